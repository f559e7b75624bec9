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

namespace {

// A kernel retransmits the first packet of a connection after a second.
constexpr int64_t kLostPacketNs = 900'000'000;

}  // namespace

// --- one message ---

MessageReader::State MessageReader::read(const Socket& socket) {
  for (;;) {
    if (bytes_.empty()) wanted_ = kHandshakeHeadBytes;
    const size_t have = bytes_.size();
    bytes_.resize(wanted_);
    const iovec view{bytes_.data() + have, wanted_ - have};
    const ssize_t got = socket.receive({&view, 1});
    bytes_.resize(have + static_cast<size_t>(std::max<ssize_t>(got, 0)));
    if (got == 0) return State::kClosed;
    if (got < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return State::kMore;
      error_ = errno;
      return State::kFailed;
    }
    if (bytes_.size() < wanted_) continue;
    if (wanted_ > kHandshakeHeadBytes) {
      // A message has a record of its own: anything after it in the same record would be where epoll does not see it.
      return socket.tls && socket.tls->holds_more() ? State::kForeign : State::kWhole;
    }
    const auto total = handshake_bytes(bytes_, &version_);
    if (!total) return State::kForeign;
    wanted_ = *total;
  }
}

// --- room ---

void RoomWatch::update(Poller* poller, const Socket& socket, Pollable* what, uint32_t events) {
  const bool wanted = socket.has_unsent();
  if (std::exchange(is_on_, wanted) != wanted) {
    poller->change(socket.fd.get(), what, events | (wanted ? static_cast<uint32_t>(EPOLLOUT) : 0u));
  }
}

// --- initiator ---

Connector::Connector(Poller* poller, Owner* owner, const Rail& from, const Endpoint& to, Purpose purpose,
                     int64_t unacknowledged_ms)
    : poller_(poller),
      owner_(owner),
      route_(to_text(to) + " from " + ip_text(from.endpoint)),
      purpose_(std::move(purpose)) {
  const auto early = [this](const char* call) {
    failed_early_ = true;
    const bool nobody = errno == ECONNREFUSED;
    early_.kind = nobody ? ConnectResult::Kind::kNobodyThere : ConnectResult::Kind::kFailed;
    const bool at_limit = errno == EMFILE || errno == ENFILE;
    early_.lacked_here = at_limit || errno == ENOBUFS || errno == ENOMEM;
    early_.text = std::string(call) + " to " + route_ + ": " + std::strerror(errno) +
                  (at_limit ? "; raise the limit on open files (ulimit -n)" : "");
  };
  Fd& fd = socket_.fd;
  fd = Fd(socket(to.family == 6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) {
    early("socket");
    return;
  }
  tune_socket(fd.get(), unacknowledged_ms);
  if (purpose_.same_machine) tune_for_loopback(fd.get());
  if (purpose_.short_segments) limit_segments(fd.get());
  sockaddr_storage storage;
  Endpoint source = from.endpoint;
  source.port = 0;
  socklen_t size = to_sockaddr(source, &storage);
#ifdef IP_BIND_ADDRESS_NO_PORT
  const int on = 1;
  setsockopt(fd.get(), IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof on);
#endif
  if (from.bound_to_netdev) bind_to_netdev(fd.get(), from.netdev);
  if (bind(fd.get(), reinterpret_cast<sockaddr*>(&storage), size) != 0) {
    early("bind");
    return;
  }
  size = to_sockaddr(to, &storage);
  if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&storage), size) != 0 && errno != EINPROGRESS) {
    early("connect");
    return;
  }
  try {
    poller_->add(fd.get(), this, EPOLLOUT);
  } catch (const TransportError&) {  // the kernel cannot watch one more
    early("epoll_ctl");
  }
}

Connector::~Connector() { hang_up(); }

void Connector::hang_up() {
  ended_ = true;
  if (socket_.fd && !failed_early_) poller_->remove(socket_.fd.get());
  socket_.fd.reset();
}

void Connector::end(ConnectResult result) {
  if (std::exchange(ended_, true)) return;
  if (socket_.fd && !failed_early_) poller_->remove(socket_.fd.get());
  if (result.kind == ConnectResult::Kind::kUp) {
    result.socket = std::move(socket_);
  } else if (socket_.fd) {
    socket_.close_gently();
  }
  owner_->on_connect_result(std::move(result));
}

void Connector::fail(ConnectResult::Kind kind, const std::string& text) {
  ConnectResult result;
  result.kind = kind;
  result.text = text;
  end(std::move(result));
}

void Connector::fail_refused(RefusalCode code, const std::string& text) {
  ConnectResult result;
  result.kind = ConnectResult::Kind::kRefused;
  result.code = code;
  result.text = text;
  end(std::move(result));
}

void Connector::check_deadline(int64_t now) {
  if (ended_) return;
  if (failed_early_) return end(std::move(early_));
  if (now < purpose_.deadline) return;
  if (step_ == Step::kConnecting) {
    return fail(ConnectResult::Kind::kTimeout,
                "no answer from " + route_ + ": the host is down or unreachable, or a firewall drops the packets");
  }
  ConnectResult result;
  result.kind = ConnectResult::Kind::kTimeout;
  result.was_taken = true;
  result.text = route_ +
                " accepted the connection but does not finish the handshake: the process there is frozen, or is not a "
                "crossrail engine, or the way there is very slow";
  end(std::move(result));
}

bool Connector::send(const Bytes& message) {
  if (socket_.send_message(message)) return true;
  fail(ConnectResult::Kind::kFailed, "the handshake with " + route_ + " broke: " + socket_.error_text());
  return false;
}

bool Connector::finish_connecting() {
  int error = 0;
  socklen_t size = sizeof error;
  getsockopt(socket_.fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  if (error != 0) {
    const auto kind = error == ECONNREFUSED ? ConnectResult::Kind::kNobodyThere
                      : error == ETIMEDOUT  ? ConnectResult::Kind::kTimeout
                                            : ConnectResult::Kind::kFailed;
    fail(kind, "connect to " + route_ + ": " + std::strerror(error) +
                   (error == ECONNREFUSED ? " (no engine listens there any more, or a firewall refuses)" : ""));
    return false;
  }
  // Even short packets were lost, so nothing suggests that it is the long ones.
  if (purpose_.short_segments && now_ns() - began_ns_ >= kLostPacketNs) {
    fail(ConnectResult::Kind::kFailed, "connect to " + route_ + ": no packet passed for a while");
    return false;
  }
  poller_->change(socket_.fd.get(), this, EPOLLIN);
  if (purpose_.tls) return begin_tls();
  step_ = Step::kChallenge;
  return send(purpose_.hello);
}

bool Connector::begin_tls() {
  if (!send(encode(StartTls{target_tag(purpose_.target->incarnation)}))) return false;
  try {
    socket_.tls = std::make_unique<TlsSession>(purpose_.tls, TlsSession::Side::kInitiator, socket_.fd.get());
  } catch (const TransportError& error) {
    fail(ConnectResult::Kind::kFailed, error.what());
    return false;
  }
  step_ = Step::kTlsAnswer;
  socket_.tls->begin_turn(0);  // our first flight: bytes that have already arrived may not be TLS
  return go_on_with_tls();
}

// The first byte of the answer tells TLS from a refusal of our StartTls, which begins like no TLS record. Later bytes
// tell nothing: they may be in the middle of a record.
void Connector::sort_answer() {
  uint8_t first = 0;
  const ssize_t got = recv(socket_.fd.get(), &first, 1, MSG_DONTWAIT | MSG_PEEK);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
  if (got == 1 && first == (kHandshakeMagic & 0xff)) {
    socket_.tls.reset();
    step_ = Step::kChallenge;
  } else {  // TLS also reports a connection that ended
    socket_.tls->begin_turn(UINT64_MAX);
    step_ = Step::kTls;
  }
}

// False: not done yet, or it ended.
bool Connector::go_on_with_tls() {
  TlsSession& tls = *socket_.tls;
  const TlsSession::Step step = tls.handshake();
  if (step == TlsSession::Step::kDone) {  // our last flight is sent together with the Hello
    step_ = Step::kChallenge;
    binding_ = tls.binding();
    if (purpose_.tls->checks_names() && !tls.is_named(purpose_.target->name)) {
      const std::string text = "the certificate there is not for the name '" + purpose_.target->name + "'";
      if (send(encode(Refusal{RefusalCode::kAuthentication, text}))) {
        fail_refused(RefusalCode::kAuthentication, route_ + ": " + text + " (tls.verify = 'name')");
      }
      return false;
    }
    return send(purpose_.hello);
  }
  const bool flushed = socket_.flush();  // including an alert, if it failed
  if (step == TlsSession::Step::kFailed) {
    fail_refused(RefusalCode::kAuthentication, route_ + ": the TLS handshake failed: " + tls.trouble());
  } else if (step == TlsSession::Step::kGone) {
    fail(ConnectResult::Kind::kFailed, route_ + " closed the connection during the TLS handshake");
  } else if (!flushed && step_ != Step::kTlsAnswer) {  // otherwise its answer says why: it has hung up on our StartTls
    fail(ConnectResult::Kind::kFailed, "the handshake with " + route_ + " broke: " + socket_.error_text());
  }
  return false;
}

void Connector::on_events(uint32_t) {
  if (ended_) return;
  go_on();
  if (!ended_ && step_ != Step::kConnecting) room_.update(poller_, socket_, this, EPOLLIN);
}

void Connector::go_on() {
  if (!socket_.flush() && step_ != Step::kTlsAnswer) {
    return fail(ConnectResult::Kind::kFailed, "the handshake with " + route_ + " broke: " + socket_.error_text());
  }
  if (step_ == Step::kConnecting && !finish_connecting()) return;
  if (step_ == Step::kTlsAnswer) sort_answer();
  if (step_ == Step::kTlsAnswer || (step_ == Step::kTls && !go_on_with_tls())) return;
  switch (reader_.read(socket_)) {
    case MessageReader::State::kMore:
      return;
    case MessageReader::State::kWhole:
      return on_message();
    case MessageReader::State::kForeign:
      return fail(ConnectResult::Kind::kFailed, route_ + " does not answer with a crossrail handshake (wrong port?)");
    case MessageReader::State::kClosed:
      return fail(ConnectResult::Kind::kFailed, route_ + " closed the connection during the handshake");
    case MessageReader::State::kFailed:
      if (socket_.tls && reader_.error() == EPROTO) {  // most likely it rejected our certificate
        return fail_refused(RefusalCode::kAuthentication,
                            route_ + ": the TLS handshake failed: " + socket_.tls->trouble());
      }
      return fail(reader_.error() == ECONNREFUSED ? ConnectResult::Kind::kNobodyThere : ConnectResult::Kind::kFailed,
                  "the handshake with " + route_ + " broke: " + std::strerror(reader_.error()));
  }
}

void Connector::on_message() {
  const Bytes message = reader_.message();
  reader_.clear();
  if (const auto refusal = decode_refusal(message)) {
    return fail_refused(refusal->code, route_ + " refuses: " + refusal->text);
  }
  if (reader_.version() != kProtocolVersion) {
    return fail_refused(RefusalCode::kVersion, route_ + " speaks version " + std::to_string(reader_.version()) +
                                                   " of the tcp transport, this engine version " +
                                                   std::to_string(kProtocolVersion) +
                                                   ": use the same crossrail release on both sides");
  }
  if (purpose_.tls && !socket_.tls) {
    return fail(ConnectResult::Kind::kFailed,
                route_ + " answers unencrypted, and this engine has tls: give tls to both, or to neither");
  }
  if (step_ == Step::kChallenge) return on_challenge(message);
  if (handshake_kind(message) != HandshakeKind::kAccept) {
    return fail(ConnectResult::Kind::kFailed, route_ + " sends a malformed end of the handshake");
  }
  if (socket_.tls) socket_.tls->lift_limit();
  ConnectResult result;
  result.kind = ConnectResult::Kind::kUp;
  end(std::move(result));
}

void Connector::on_challenge(const Bytes& message) {
  const auto challenge = decode_challenge(message);
  if (!challenge) return fail(ConnectResult::Kind::kFailed, route_ + " sends a malformed challenge");
  const Proven proven{purpose_.hello, challenge->nonce,
                      binding_ ? std::span<const uint8_t>(*binding_) : std::span<const uint8_t>{}};
  if (!equal_in_constant_time(challenge->proof, acceptor_proof(purpose_.key, proven))) {
    const std::string text = no_proof_text(binding_.has_value());
    if (!send(encode(Refusal{RefusalCode::kAuthentication, text}))) return;
    return fail_refused(RefusalCode::kAuthentication, route_ + ": " + text);
  }
  step_ = Step::kAccept;
  if (send(encode(Proof{initiator_proof(purpose_.key, proven)}))) go_on();
}

}  // namespace crossrail::tcp
