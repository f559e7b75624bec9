// The initiator's half of the handshake.
#include <netinet/in.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "transport/tcp/connect.h"
#include "util/errors.h"

namespace crossrail::tcp {

// --- one message ---

MessageReader::State MessageReader::read(int fd) {
  for (;;) {
    if (bytes_.empty()) wanted_ = kHandshakeHeadBytes;
    const size_t have = bytes_.size();
    bytes_.resize(wanted_);
    const ssize_t got = recv(fd, bytes_.data() + have, wanted_ - have, MSG_DONTWAIT);
    bytes_.resize(have + static_cast<size_t>(std::max<ssize_t>(got, 0)));
    if (got == 0) return State::kClosed;
    if (got < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return State::kMore;
      error_ = errno;
      return State::kFailed;
    }
    if (bytes_.size() < wanted_) continue;
    if (wanted_ > kHandshakeHeadBytes) return State::kWhole;
    const auto total = handshake_bytes(bytes_, &version_);
    if (!total) return State::kForeign;
    wanted_ = *total;
  }
}

// --- initiator ---

Connector::Connector(Poller* poller, Owner* owner, const Rail& from, const Endpoint& to, const Digest& key, Bytes hello,
                     Deadline deadline, int64_t unacknowledged_ms, bool same_machine)
    : poller_(poller),
      owner_(owner),
      route_(to_text(to) + " from " + ip_text(from.endpoint)),
      key_(key),
      hello_(std::move(hello)),
      deadline_(deadline) {
  const auto early = [this](const char* call) {
    failed_early_ = true;
    const bool nobody = errno == ECONNREFUSED;
    early_.kind = nobody ? ConnectResult::Kind::kNobodyThere : ConnectResult::Kind::kFailed;
    early_.text = std::string(call) + " to " + route_ + ": " + std::strerror(errno);
  };
  fd_ = Fd(socket(to.family == 6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd_) {
    early("socket");
    return;
  }
  tune_socket(fd_.get(), unacknowledged_ms);
  if (same_machine) tune_for_loopback(fd_.get());
  sockaddr_storage storage;
  Endpoint source = from.endpoint;
  source.port = 0;
  socklen_t size = to_sockaddr(source, &storage);
#ifdef IP_BIND_ADDRESS_NO_PORT
  const int on = 1;
  setsockopt(fd_.get(), IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof on);
#endif
  if (from.bound_to_netdev) bind_to_netdev(fd_.get(), from.netdev);
  if (bind(fd_.get(), reinterpret_cast<sockaddr*>(&storage), size) != 0) {
    early("bind");
    return;
  }
  size = to_sockaddr(to, &storage);
  if (::connect(fd_.get(), reinterpret_cast<sockaddr*>(&storage), size) != 0 && errno != EINPROGRESS) {
    early("connect");
    return;
  }
  try {
    poller_->add(fd_.get(), this, EPOLLOUT);
  } catch (const TransportError&) {  // the kernel cannot watch one more
    early("epoll_ctl");
  }
}

Connector::~Connector() { hang_up(); }

void Connector::hang_up() {
  ended_ = true;
  if (fd_ && !failed_early_) poller_->remove(fd_.get());
  fd_.reset();
}

void Connector::end(ConnectResult result) {
  if (std::exchange(ended_, true)) return;
  if (fd_ && !failed_early_) poller_->remove(fd_.get());
  if (result.kind == ConnectResult::Kind::kUp) result.fd = std::move(fd_);
  fd_.reset();
  owner_->on_connect_result(std::move(result));
}

void Connector::fail(ConnectResult::Kind kind, const std::string& text) {
  ConnectResult result;
  result.kind = kind;
  result.text = text;
  end(std::move(result));
}

void Connector::check_deadline(int64_t now) {
  if (ended_) return;
  if (failed_early_) return end(std::move(early_));
  if (now < deadline_) return;
  if (step_ == Step::kConnecting) {
    return fail(ConnectResult::Kind::kTimeout,
                "no answer from " + route_ + ": the host is down or unreachable, or a firewall drops the packets");
  }
  fail(ConnectResult::Kind::kTimeout, route_ +
                                          " took the connection but does not finish the handshake: the process there "
                                          "is frozen, or is no crossrail engine");
}

bool Connector::send(const Bytes& message) {
  // Nothing was sent before: it fits the empty socket buffer.
  const ssize_t put = ::send(fd_.get(), message.data(), message.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (put == static_cast<ssize_t>(message.size())) return true;
  fail(ConnectResult::Kind::kFailed, "the handshake with " + route_ + " broke: " + std::strerror(errno));
  return false;
}

void Connector::on_events(uint32_t) {
  if (ended_) return;
  if (step_ == Step::kConnecting) {
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) {
      const auto kind = error == ECONNREFUSED ? ConnectResult::Kind::kNobodyThere
                        : error == ETIMEDOUT  ? ConnectResult::Kind::kTimeout
                                              : ConnectResult::Kind::kFailed;
      return fail(kind,
                  "connect to " + route_ + ": " + std::strerror(error) +
                      (error == ECONNREFUSED ? " (no engine listens there any more, or a firewall refuses)" : ""));
    }
    step_ = Step::kChallenge;
    poller_->change(fd_.get(), this, EPOLLIN);
    if (!send(hello_)) return;
  }
  switch (reader_.read(fd_.get())) {
    case MessageReader::State::kMore:
      return;
    case MessageReader::State::kWhole:
      return on_message();
    case MessageReader::State::kForeign:
      return fail(ConnectResult::Kind::kFailed,
                  route_ + " answers with something else than a crossrail handshake: wrong port?");
    case MessageReader::State::kClosed:
      return fail(ConnectResult::Kind::kFailed, route_ + " closed the connection during the handshake");
    case MessageReader::State::kFailed:
      return fail(reader_.error() == ECONNREFUSED ? ConnectResult::Kind::kNobodyThere : ConnectResult::Kind::kFailed,
                  "the handshake with " + route_ + " broke: " + std::strerror(reader_.error()));
  }
}

void Connector::on_message() {
  const Bytes message = reader_.message();
  reader_.clear();
  if (const auto refusal = decode_refusal(message)) {
    ConnectResult result;
    result.kind = ConnectResult::Kind::kRefused;
    result.code = refusal->code;
    result.text = route_ + " refuses: " + refusal->text;
    return end(std::move(result));
  }
  if (reader_.version() != kProtocolVersion) {
    ConnectResult result;
    result.kind = ConnectResult::Kind::kRefused;
    result.code = RefusalCode::kVersion;
    result.text = route_ + " speaks version " + std::to_string(reader_.version()) +
                  " of the tcp transport, this engine version " + std::to_string(kProtocolVersion) +
                  ": use the same crossrail release on both sides";
    return end(std::move(result));
  }
  if (step_ == Step::kChallenge) {
    const auto challenge = decode_challenge(message);
    if (!challenge) return fail(ConnectResult::Kind::kFailed, route_ + " sends a malformed challenge");
    if (!equal_in_constant_time(challenge->proof, acceptor_proof(key_, hello_, challenge->nonce))) {
      const std::string text = "the two engines do not have the same secret";
      send(encode(Refusal{RefusalCode::kAuthentication, text}));
      if (ended_) return;
      ConnectResult result;
      result.kind = ConnectResult::Kind::kRefused;
      result.code = RefusalCode::kAuthentication;
      result.text = route_ + ": " + text + ": set the same `secret` (or CROSSRAIL_SECRET) on both sides";
      return end(std::move(result));
    }
    step_ = Step::kAccept;
    if (!send(encode(Proof{initiator_proof(key_, hello_, challenge->nonce)}))) return;
    return on_events(EPOLLIN);
  }
  if (handshake_kind(message) != HandshakeKind::kAccept) {
    return fail(ConnectResult::Kind::kFailed, route_ + " sends a malformed end of the handshake");
  }
  ConnectResult result;
  result.kind = ConnectResult::Kind::kUp;
  end(std::move(result));
}

}  // namespace crossrail::tcp
