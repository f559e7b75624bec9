// Peers that come to us: strangers at the door, and links that lost their connections.
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "transport/tcp/frames.h"
#include "transport/tcp/tcp_transport.h"
#include "util/errors.h"

namespace crossrail::tcp {

namespace {

constexpr size_t kStrangersMax = 256;
constexpr int64_t kStrangerPatienceNs = 5'000'000'000;
constexpr int64_t kAcceptPauseNs = 200'000'000;

}  // namespace

void TcpTransport::accept_all(Listener& listener) {
  for (int accepted = 0; accepted < 64; ++accepted) {
    Fd fd(accept4(rails_[listener.rail].listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (const int error = errno; error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM) {
        // Polling it again and again would use up a core: peers wait a little.
        poller_.change(rails_[listener.rail].listener.get(), &listener, 0);
        listeners_paused_until_ns_ = now_ + kAcceptPauseNs;
        if (!std::exchange(strangers_reported_, true)) {
          const bool is_limit = error == EMFILE || error == ENFILE;
          sink_->on_protocol_error("", std::string("cannot accept more connections: ") + std::strerror(error) +
                                           (is_limit ? "; raise the limit on open files (ulimit -n). Reported once"
                                                     : "; the kernel is short of memory. Reported once"));
        }
      }
      return;
    }
    tune_socket(fd.get(), options_.peer_timeout_ns / 1'000'000);
    make_room_for_stranger();
    std::string who = peer_text(fd.get());
    try {
      acceptors_.push_back(std::make_unique<Acceptor>(&poller_, this, std::move(fd), std::move(who), key_,
                                                      address_.incarnation, tls_, now_ + kStrangerPatienceNs));
    } catch (const TransportError& error) {  // the kernel cannot watch one more
      sink_->on_protocol_error("", std::string("cannot accept a connection: ") + error.what());
      return;
    }
    next_tick_ns_ = std::min(next_tick_ns_, now_);
  }
}

// If there are too many, the one that has been silent for longest is turned away: it has had its chance.
void TcpTransport::make_room_for_stranger() {
  size_t open = 0;
  for (const auto& acceptor : acceptors_) open += acceptor->ended() ? 0 : 1;
  if (open < kStrangersMax) return;
  for (auto& acceptor : acceptors_) {
    if (acceptor->ended()) continue;
    acceptor->turn_away(RefusalCode::kFull, "too many connections are in their handshake: try again");
    return;
  }
}

void TcpTransport::on_stranger(RefusalCode code, const std::string& who, const std::string& what) {
  if (const auto line = stranger_news_.take(code, who, what, now_)) sink_->on_protocol_error(line->who, line->text);
}

void TcpTransport::tell_of_strangers() {
  while (const auto line = stranger_news_.take_due(now_)) sink_->on_protocol_error(line->who, line->text);
}

std::optional<Refusal> TcpTransport::check_hello(const Hello& hello) {
  if (closed_) return Refusal{RefusalCode::kClosing, "the engine is closing"};
  // Two for each pair of rails; there are no more pairs than rails.
  const size_t channels_max = 2 * (hello.sender.endpoints.size() + rails_.size());
  if (hello.channel >= channels_max || hello.epoch == 0 || !hello.sender.has(TransportKind::kTcp)) {
    return Refusal{RefusalCode::kMalformed, "its first message is malformed"};
  }
  // An incarnation has one name: nobody who was let in under his own takes the place of another.
  const bool is_posing = std::ranges::any_of(out_, [&](const auto& out) {
    return out->address->incarnation == hello.sender.incarnation && out->address->name != hello.sender.name;
  });
  if (is_posing) return Refusal{RefusalCode::kAuthentication, "the engine of this incarnation has another name"};
  const auto found = in_.find({hello.sender.incarnation, hello.link_id});
  if (found == in_.end()) {
    if (!hello.resumes) return std::nullopt;
    return Refusal{
        RefusalCode::kUnknownLink,
        "it could not be reached for longer than twice our peer_timeout_s, so we gave it up; peer_timeout_s is " +
            seconds_text(options_.peer_timeout_ns) + ". Connect again"};
  }
  if (found->second->over) return Refusal{RefusalCode::kUnknownLink, "the link has ended"};
  const auto channel = found->second->channels.find(hello.channel);
  if (channel != found->second->channels.end() && hello.epoch < channel->second.epoch_min) {
    return Refusal{RefusalCode::kStale, "a later connection of this channel exists"};
  }
  return std::nullopt;
}

// Binds an accepted connection to its rail's interface, like the connections that we make: otherwise what we send on it
// would leave through whatever interface has the first route to the peer's subnet. If the kernel does not let us, the
// connection is left to its routes.
void TcpTransport::keep_to_rail(int fd) {
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &size) != 0) return;
  const Endpoint arrived = from_sockaddr(storage);
  for (const Rail& rail : rails_) {
    if (rail.endpoint.ip != arrived.ip || rail.endpoint.port != arrived.port) continue;
    if (rail.bound_to_netdev) bind_to_netdev(fd, rail.netdev);
    return;
  }
}

// An engine has one link to us at a time: once it has begun another, it does not return to a link without a connection.
// Otherwise a peer that begins link after link would make us keep each of them for as long as it might return.
void TcpTransport::end_unconnected(const Address& peer) {
  for (auto item = in_.lower_bound({peer.incarnation, 0}); item != in_.end() && item->first.first == peer.incarnation;
       ++item) {
    InLink& link = *item->second;
    // Under the name that it came in by: nobody can end another's links.
    link.over = link.over || (!link.is_connected() && link.peer->name == peer.name);
  }
  tick_soon();
}

// The channel that a connection is for, in its new epoch.
InChannel& TcpTransport::begin_epoch(const Hello& hello) {
  const std::pair key(hello.sender.incarnation, hello.link_id);
  if (!in_.contains(key)) end_unconnected(hello.sender);
  auto& owned = in_[key];
  if (!owned) {
    owned = std::make_unique<InLink>();
    owned->transport = this;
    owned->id = hello.link_id;
    owned->peer = std::make_shared<const Address>(hello.sender);
  }
  InLink& link = *owned;
  // Also for a link that existed before: ours may be a new one, begun while the peer's had no connection.
  for (auto& out : out_) {
    if (link.twin == nullptr && out->address->incarnation == hello.sender.incarnation) pair_twins(*out, link);
  }
  InChannel& channel = link.channels[hello.channel];
  channel.link = &link;
  channel.index = hello.channel;
  if (channel.is_open()) channel.stream->break_off("the peer made a new connection of it");
  if (channel.stream) bury(std::move(channel.stream));
  channel.epoch_min = hello.epoch;
  return channel;
}

void TcpTransport::attach_incoming(const Hello& hello, std::shared_ptr<Connection> connection) {
  // Asked for twice, the first time without success; or by a new link of the peer whose old one ended silently.
  connection->leave(Role::kAcceptor, "the peer uses the connection again");
  InChannel& channel = begin_epoch(hello);
  channel.stream = std::make_unique<InStream>(this, &channel, std::move(connection));
  note_connected(*channel.link);
}

void TcpTransport::on_accepted(Acceptor&, const Hello& hello, Socket socket) {
  InChannel& channel = begin_epoch(hello);
  InLink& link = *channel.link;
  if (!Acceptor::accept(socket)) {  // the peer will try again
    note_connected(link);
    return;
  }
  if (hello.sender.host == address_.host) tune_for_loopback(socket.fd.get());
  if (!same_host(hello.sender, address_)) keep_to_rail(socket.fd.get());
  try {
    auto connection = std::make_shared<Connection>(&connections_, std::move(socket), hello.is_bulk);
    channel.stream = std::make_unique<InStream>(this, &channel, std::move(connection));
    note_connected(link);
    if (link.twin != nullptr) reconsider_attempts(*link.twin);
  } catch (const TransportError& error) {
    note_connected(link);
    sink_->on_protocol_error(link.peer->name, std::string("cannot accept its connection: ") + error.what());
  }
}

void TcpTransport::on_incoming_broken(InChannel& channel, const InStream& stream) {
  InLink& link = *channel.link;
  channel.control = {};  // a link may have many channels, each with much unread
  if (stream.blame() == Blame::kPeer) sink_->on_protocol_error(link.peer->name, stream.reason());
  note_connected(link);
  // Told on this connection after the initiator has seen the old one's end: it only asks about what it was waiting for
  // then.
  if (!link.over) tell_outcomes_again(link);
  next_tick_ns_ = std::min(next_tick_ns_, now_);
}

void TcpTransport::note_connected(InLink& link) {
  const bool was_connected = link.unconnected_since_ns == 0;
  if (link.is_connected() == was_connected) return;
  link.unconnected_since_ns = was_connected ? now_ : 0;
  unconnected_ += was_connected ? 1 : -1;
}

// Forgets links whose peers said goodbye, or have been gone for longer than they would try to come back.
void TcpTransport::tend_incoming() {
  for (auto item = in_.begin(); item != in_.end();) {
    InLink& link = *item->second;
    const bool expired =
        link.unconnected_since_ns != 0 && now_ - link.unconnected_since_ns > 2 * options_.peer_timeout_ns;
    if (!link.over && !expired) {
      ++item;
      continue;
    }
    drop(link);
    item = in_.erase(item);
  }
}

void TcpTransport::drop(InLink& link) {
  for (auto& [index, channel] : link.channels) {
    if (channel.stream) bury(std::move(channel.stream));
  }
  if (link.unconnected_since_ns != 0) --unconnected_;
  if (link.twin != nullptr) link.twin->twin = nullptr;
  std::erase(acks_, &link);
  std::erase(holding_, &link);
}

}  // namespace crossrail::tcp
