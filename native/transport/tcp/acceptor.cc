// The acceptor's half of the handshake. All that a stranger sends comes here.
#include <sys/epoll.h>

#include <cerrno>
#include <utility>

#include "transport/tcp/connect.h"
#include "util/errors.h"

namespace crossrail::tcp {

namespace {
constexpr const char* kNotMeText =
    "another engine is at this address now: the one you look for has ended or was restarted";
}  // namespace

Acceptor::Acceptor(Poller* poller, Owner* owner, Fd fd, std::string who, const Digest& key, const Incarnation& self,
                   std::shared_ptr<TlsContext> tls, Deadline deadline)
    : poller_(poller),
      owner_(owner),
      socket_{std::move(fd), nullptr},
      who_(std::move(who)),
      key_(key),
      self_tag_(target_tag(self)),
      tls_(std::move(tls)),
      deadline_(deadline) {
  poller_->add(socket_.fd.get(), this, EPOLLIN | EPOLLRDHUP);
}

Acceptor::~Acceptor() { end(); }

void Acceptor::end() {
  ended_ = true;
  if (socket_.fd) poller_->remove(socket_.fd.get());
  socket_.fd.reset();
}

bool Acceptor::accept(const Socket& socket) { return socket.send_message(encode(Accept{})); }

void Acceptor::refuse(RefusalCode code, const std::string& text) {
  if (ended_) return;
  owner_->on_stranger(code, who_, text);
  turn_away(code, text);
}

void Acceptor::turn_away(RefusalCode code, const std::string& text) {
  if (ended_) return;
  // Who is in the middle of TLS gets no words of ours, but an alert.
  if (!in_tls_handshake_) static_cast<void>(socket_.send_message(encode(Refusal{code, text})));
  poller_->remove(socket_.fd.get());
  socket_.close_gently();
  end();
}

void Acceptor::check_deadline(int64_t now) {
  if (ended_ || now < deadline_) return;
  // One that was frozen meanwhile may try again.
  refuse(RefusalCode::kFull, "the handshake was not finished in time");
}

// False: not done yet, or it ended.
bool Acceptor::go_on_with_tls() {
  TlsSession& tls = *socket_.tls;
  const TlsSession::Step step = tls.handshake();
  const bool flushed = socket_.flush();  // with an alert, if it failed
  if (step == TlsSession::Step::kFailed) {
    refuse(RefusalCode::kAuthentication, "the TLS handshake failed: " + tls.trouble());
    return false;
  }
  if (!flushed || step == TlsSession::Step::kGone) {
    end();
    return false;
  }
  if (step == TlsSession::Step::kMore) return false;
  in_tls_handshake_ = false;
  binding_ = tls.binding();
  return true;
}

void Acceptor::on_events(uint32_t) {
  if (ended_) return;
  go_on();
  if (!ended_) room_.update(poller_, socket_, this, EPOLLIN | EPOLLRDHUP);
}

void Acceptor::go_on() {
  if (!socket_.flush()) return end();
  if (in_tls_handshake_ && !go_on_with_tls()) return;
  switch (reader_.read(socket_)) {
    case MessageReader::State::kMore:
      return;
    case MessageReader::State::kWhole:
      return on_message();
    case MessageReader::State::kForeign:
      return refuse(RefusalCode::kMalformed, "what it sent is not a crossrail handshake");
    case MessageReader::State::kFailed:
      if (socket_.tls && reader_.error() == EPROTO)
        owner_->on_stranger(RefusalCode::kAuthentication, who_, "TLS: " + socket_.tls->trouble());
      return end();
    case MessageReader::State::kClosed:
      return end();  // port scans and health checks do so all day
  }
}

void Acceptor::on_message() {
  const Bytes message = reader_.message();
  reader_.clear();
  if (reader_.version() != kProtocolVersion) {
    return refuse(RefusalCode::kVersion, "the connecting engine speaks version " + std::to_string(reader_.version()) +
                                             " of the tcp transport, the accepting engine version " +
                                             std::to_string(kProtocolVersion) +
                                             ": use the same crossrail release on both sides");
  }
  if (const auto refusal = decode_refusal(message)) {
    owner_->on_stranger(RefusalCode::kMalformed, who_, "it refuses us: " + refusal->text);
    return end();
  }
  if (!hello_) {
    if (!socket_.tls && handshake_kind(message) == HandshakeKind::kStartTls) return on_start_tls(message);
    return on_hello(message);
  }
  const auto proof = decode_proof(message);
  if (!proof) return refuse(RefusalCode::kMalformed, "its second message is malformed");
  if (!equal_in_constant_time(proof->proof, initiator_proof(key_, proven()))) {
    return refuse(RefusalCode::kAuthentication, no_proof_text(binding_.has_value()));
  }
  if (const auto refusal = owner_->check_hello(*hello_)) return turn_away(refusal->code, refusal->text);
  poller_->remove(socket_.fd.get());
  if (socket_.tls) socket_.tls->lift_limit();
  ended_ = true;
  owner_->on_accepted(*this, *hello_, std::move(socket_));
}

void Acceptor::on_start_tls(const Bytes& message) {
  const auto start = decode_start_tls(message);
  if (!start) return refuse(RefusalCode::kMalformed, "its first message is malformed");
  if (start->target_tag != self_tag_) return turn_away(RefusalCode::kNotMe, kNotMeText);
  if (!tls_) {
    return refuse(RefusalCode::kAuthentication,
                  "the connecting engine has tls and the accepting engine has not: give tls to both, or to neither");
  }
  try {
    socket_.tls = std::make_unique<TlsSession>(tls_, TlsSession::Side::kAcceptor, socket_.fd.get());
  } catch (const TransportError& error) {
    return refuse(RefusalCode::kFull, error.what());
  }
  in_tls_handshake_ = true;
  go_on();  // its first record may be here
}

Proven Acceptor::proven() const {
  return {hello_bytes_, nonce_, binding_ ? std::span<const uint8_t>(*binding_) : std::span<const uint8_t>{}};
}

void Acceptor::on_hello(const Bytes& message) {
  hello_ = decode_hello(message);
  if (!hello_) return refuse(RefusalCode::kMalformed, "its first message is malformed");
  if (hello_->target_tag != self_tag_) return turn_away(RefusalCode::kNotMe, kNotMeText);
  if (tls_ && !socket_.tls) {
    return refuse(RefusalCode::kAuthentication,
                  "the accepting engine has tls and the connecting engine has not: give tls to both, or to neither");
  }
  if (tls_ && tls_->checks_names() && !socket_.tls->is_named(hello_->sender.name)) {
    return refuse(RefusalCode::kAuthentication, "the certificate of the connecting engine is not for the name '" +
                                                    hello_->sender.name + "' (tls.verify = 'name')");
  }
  if (const auto refusal = owner_->check_hello(*hello_)) return turn_away(refusal->code, refusal->text);
  hello_bytes_ = message;
  nonce_ = draw_nonce();
  if (!socket_.send_message(encode(Challenge{nonce_, acceptor_proof(key_, proven())}))) end();
}

}  // namespace crossrail::tcp
