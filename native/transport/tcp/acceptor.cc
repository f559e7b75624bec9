// The acceptor's half of the handshake. All that a stranger sends comes here.
#include <sys/epoll.h>

#include <array>
#include <cerrno>
#include <utility>

#include "transport/tcp/connect.h"

namespace crossrail::tcp {

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
