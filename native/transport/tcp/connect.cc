#include "transport/tcp/connect.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "util/errors.h"

namespace crossrail::tcp {

namespace {

// Kernels' probes of idle connections: a peer that is unplugged while nothing moves is noticed after about half a minute.
constexpr int kKeepIdleS = 15;
constexpr int kKeepIntervalS = 5;
constexpr int kKeepProbes = 3;

void set(int fd, int level, int name, int value) { setsockopt(fd, level, name, &value, sizeof value); }

}  // namespace

void tune_socket(int fd, int64_t unacknowledged_ms) {
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, kKeepIdleS);
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, kKeepIntervalS);
  set(fd, IPPROTO_TCP, TCP_KEEPCNT, kKeepProbes);
  set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(std::min<int64_t>(unacknowledged_ms, 1 << 30)));
}

void bind_to_netdev(int fd, const std::string& netdev) {
  setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, netdev.c_str(), static_cast<socklen_t>(netdev.size() + 1));
}

void tune_for_loopback(int fd) {
  static constexpr char kReno[] = "reno";  // always allowed; bbr and its like pace
  setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, kReno, sizeof kReno - 1);
}

socklen_t to_sockaddr(const Endpoint& endpoint, sockaddr_storage* out) {
  std::memset(out, 0, sizeof *out);
  if (endpoint.family == 6) {
    auto* address = reinterpret_cast<sockaddr_in6*>(out);
    address->sin6_family = AF_INET6;
    address->sin6_port = htons(endpoint.port);
    std::memcpy(&address->sin6_addr, endpoint.ip.data(), 16);
    return sizeof *address;
  }
  auto* address = reinterpret_cast<sockaddr_in*>(out);
  address->sin_family = AF_INET;
  address->sin_port = htons(endpoint.port);
  std::memcpy(&address->sin_addr, endpoint.ip.data(), 4);
  return sizeof *address;
}

Endpoint from_sockaddr(const sockaddr_storage& storage) {
  Endpoint endpoint{};
  if (storage.ss_family == AF_INET6) {
    const auto* address = reinterpret_cast<const sockaddr_in6*>(&storage);
    endpoint.family = 6;
    endpoint.port = ntohs(address->sin6_port);
    endpoint.prefix_bits = 128;
    std::memcpy(endpoint.ip.data(), &address->sin6_addr, 16);
  } else {
    const auto* address = reinterpret_cast<const sockaddr_in*>(&storage);
    endpoint.family = 4;
    endpoint.port = ntohs(address->sin_port);
    endpoint.prefix_bits = 32;
    std::memcpy(endpoint.ip.data(), &address->sin_addr, 4);
  }
  return endpoint;
}

std::string peer_text(int fd) {
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&storage), &size) != 0) return "an unknown address";
  return to_text(from_sockaddr(storage));
}

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
  set(fd_.get(), IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1);
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

// --- acceptor ---

Acceptor::Acceptor(Poller* poller, Owner* owner, Fd fd, std::string who, const Digest& key, const Incarnation& self,
                   Deadline deadline)
    : poller_(poller),
      owner_(owner),
      fd_(std::move(fd)),
      who_(std::move(who)),
      key_(key),
      self_tag_(target_tag(self)),
      deadline_(deadline) {
  poller_->add(fd_.get(), this, EPOLLIN | EPOLLRDHUP);
}

Acceptor::~Acceptor() { end(); }

void Acceptor::end() {
  ended_ = true;
  if (fd_) poller_->remove(fd_.get());
  fd_.reset();
}

bool Acceptor::accept(int fd) {
  const Bytes message = encode(Accept{});
  return ::send(fd, message.data(), message.size(), MSG_DONTWAIT | MSG_NOSIGNAL) ==
         static_cast<ssize_t>(message.size());
}

void Acceptor::refuse(RefusalCode code, const std::string& text) {
  if (ended_) return;
  owner_->on_stranger(who_, text);
  turn_away(code, text);
}

void Acceptor::turn_away(RefusalCode code, const std::string& text) {
  if (ended_) return;
  const Bytes message = encode(Refusal{code, text});
  [[maybe_unused]] const ssize_t put = ::send(fd_.get(), message.data(), message.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  // Closing with unread bytes would reset the connection and could take the refusal along: take what is there first.
  ::shutdown(fd_.get(), SHUT_WR);
  std::array<uint8_t, 4096> rest;
  for (int i = 0; i < 8 && recv(fd_.get(), rest.data(), rest.size(), MSG_DONTWAIT) > 0; ++i) {
  }
  end();
}

void Acceptor::check_deadline(int64_t now) {
  if (ended_ || now < deadline_) return;
  // One that was frozen meanwhile may try again.
  refuse(RefusalCode::kFull, "the handshake was not finished in time");
}

void Acceptor::on_events(uint32_t) {
  if (ended_) return;
  switch (reader_.read(fd_.get())) {
    case MessageReader::State::kMore:
      return;
    case MessageReader::State::kWhole:
      return on_message();
    case MessageReader::State::kForeign:
      return refuse(RefusalCode::kMalformed, "what it sends is no crossrail handshake");
    case MessageReader::State::kClosed:
    case MessageReader::State::kFailed:
      return end();  // port scans and health checks do so all day
  }
}

void Acceptor::on_message() {
  const Bytes message = reader_.message();
  reader_.clear();
  if (reader_.version() != kProtocolVersion) {
    return refuse(RefusalCode::kVersion, "it speaks version " + std::to_string(reader_.version()) +
                                             " of the tcp transport, this engine version " +
                                             std::to_string(kProtocolVersion) +
                                             ": use the same crossrail release on both sides");
  }
  if (const auto refusal = decode_refusal(message)) {
    owner_->on_stranger(who_, "it refuses us: " + refusal->text);
    return end();
  }
  if (!hello_) {
    hello_ = decode_hello(message);
    if (!hello_) return refuse(RefusalCode::kMalformed, "its first message is malformed");
    if (hello_->target_tag != self_tag_) {
      return turn_away(RefusalCode::kNotMe,
                       "another engine is at this address now: the one you look for has ended or was restarted");
    }
    if (const auto refusal = owner_->check_hello(*hello_)) return turn_away(refusal->code, refusal->text);
    hello_bytes_ = message;
    nonce_ = draw_nonce();
    const Bytes challenge = encode(Challenge{nonce_, acceptor_proof(key_, hello_bytes_, nonce_)});
    if (::send(fd_.get(), challenge.data(), challenge.size(), MSG_DONTWAIT | MSG_NOSIGNAL) !=
        static_cast<ssize_t>(challenge.size())) {
      end();
    }
    return;
  }
  const auto proof = decode_proof(message);
  if (!proof) return refuse(RefusalCode::kMalformed, "its second message is malformed");
  if (!equal_in_constant_time(proof->proof, initiator_proof(key_, hello_bytes_, nonce_))) {
    return refuse(
        RefusalCode::kAuthentication,
        "the two engines do not have the same secret: set the same `secret` (or CROSSRAIL_SECRET) on both sides");
  }
  if (const auto refusal = owner_->check_hello(*hello_)) return turn_away(refusal->code, refusal->text);
  poller_->remove(fd_.get());
  Fd fd = std::move(fd_);
  ended_ = true;
  owner_->on_accepted(*this, *hello_, std::move(fd));
}

}  // namespace crossrail::tcp
