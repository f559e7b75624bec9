// One connection for both directions. Where two engines send each other small operations by turns, a connection per
// direction makes the kernels acknowledge each of them with a packet of its own; on a shared one the answer carries the
// acknowledgement along. The side that accepted a connection of the small lane asks to use it (Sharer) instead of
// making one. If both made one at the same time, the engine with the larger incarnation moves over to the other's.

#include "transport/tcp/frames.h"
#include "transport/tcp/tcp_transport.h"

namespace crossrail::tcp {

namespace {
// The peer's connection is up, so its answer takes a round trip. After this long the peer is far away, frozen or cut
// off, and we make a connection of our own, with the question still open. A later yes still counts: the peer has moved
// over by then, and if we went elsewhere we would end that connection.
constexpr int64_t kShareNs = 300'000'000;
// Limit for frames that the peer does not read: at least 600 answers, and a question of ours per channel. An engine
// asks once for a connection, and does not ask again before it has the answer or a connection of its own.
constexpr size_t kShareControlBytesMax = 64 << 10;
}  // namespace

// --- who asks ---

Sharer::Sharer(OutChannel* channel, std::shared_ptr<Connection> connection, const ShareMeta& share, Deadline patience)
    : Stream(Role::kInitiator, std::move(connection)), channel_(channel), share_(share), patience_(patience) {}

void Sharer::fill(TxBatch& batch) {
  if (asked_ || !batch.has_room(sizeof(FrameHeader) + sizeof share_)) return;
  asked_ = true;
  put_head(batch, FrameType::kShare, 0, 0, share_, 0);
}

bool Sharer::on_head(const FrameHeader& header, std::span<const std::byte> meta, Placement& place) {
  const auto type = static_cast<FrameType>(header.type);
  ConnectResult result;
  if (type == FrameType::kClosing && header.payload_bytes == 0) {
    result.kind = ConnectResult::Kind::kRefused;
    result.code = RefusalCode::kClosing;
    result.text = text_of(meta);
    end(std::move(result));
    return true;
  }
  if (type == FrameType::kShare) return reject("a question about a connection that it made itself");
  if (type != FrameType::kShared) {  // about operations of an earlier link on this connection, which ended
    place.add_discard(header.payload_bytes);
    return true;
  }
  if (meta.size() < sizeof(SharedMeta) || header.payload_bytes != 0) return reject_malformed(type);
  const auto shared = read_meta<SharedMeta>(meta);
  if (shared.channel != share_.channel || shared.epoch != share_.epoch) return true;  // to an earlier question
  if (shared.code == 0) {
    result.kind = ConnectResult::Kind::kUp;
    result.connection = connection();
  } else {
    result.kind = ConnectResult::Kind::kRefused;
    result.code = static_cast<RefusalCode>(shared.code);
    result.text = "the peer refuses: " + text_of(meta.subspan(sizeof shared));
  }
  end(std::move(result));
  return true;
}

void Sharer::on_broken() {
  ConnectResult result;
  result.text = reason();
  end(std::move(result));
}

void Sharer::end(ConnectResult result) {
  if (std::exchange(ended_, true)) return;
  hang_up();                                                                   // the operations' stream takes its place
  if (result.kind == ConnectResult::Kind::kUp && connection()->is_broken()) {  // no other stream was left on it
    result.kind = ConnectResult::Kind::kFailed;
    result.text = "the connection that the peer made broke";
  }
  channel_->on_share_result(std::move(result));
}

// A connection that the peer made over this channel's rails and that carries no operations of ours yet, or null.
std::shared_ptr<Connection> TcpTransport::find_shareable(const OutChannel& channel) const {
  const OutLink& link = *channel.link;
  const bool is_self = link.address->incarnation == address_.incarnation;
  if (channel.lane() != Lane::kSmall || link.twin == nullptr || is_self) return nullptr;
  const RailPair& ours = link.pairs[channel.pair()];
  const std::vector<RailPair> theirs = pair_rails(link.address->endpoints, address_.endpoints);
  for (const auto& [index, incoming] : link.twin->channels) {
    const bool is_small = static_cast<Lane>(index & 1) == Lane::kSmall;
    if (!is_small || !incoming.is_open() || index >> 1 >= theirs.size()) continue;
    if (theirs[index >> 1] != RailPair{ours.peer_rail, ours.rail}) continue;
    const auto& connection = incoming.stream->connection();
    if (!connection->carries(Role::kInitiator)) return connection;
  }
  return nullptr;
}

// Not again if sharing failed: that connection may be useless. Unless the one made instead has proved that the peer can
// be reached, or none can be made: a peer behind a firewall can only come to us.
bool TcpTransport::may_share(const OutChannel& channel) const {
  if (channel.has_short_segments) return false;  // the peer's has long ones
  if (!channel.is_open()) return !channel.shuns_sharing;
  return channel.retry_pause_ns == 0 || (now_ >= channel.retry_at_ns && channel.was_good(now_));
}

bool TcpTransport::start_sharing(OutChannel& channel) {
  std::shared_ptr<Connection> connection = may_share(channel) ? find_shareable(channel) : nullptr;
  if (connection == nullptr) return false;
  OutLink& link = *channel.link;
  const ShareMeta share{link.id, channel.index, ++link.newest_epoch, link.up};
  channel.sharer = std::make_unique<Sharer>(&channel, std::move(connection), share, now_ + kShareNs);
  channel.sharer->pump();
  return true;
}

// Both sides have made a connection: exactly one of the two engines gives up its own.
bool TcpTransport::should_move(const OutChannel& channel) const {
  const OutLink& link = *channel.link;
  return channel.lane() == Lane::kSmall && link.twin != nullptr && channel.is_usable() && !channel.is_connecting() &&
         may_share(channel) && address_.incarnation > link.address->incarnation &&
         !channel.stream->connection()->carries(Role::kAcceptor) && find_shareable(channel) != nullptr;
}

// The peer has made a connection. An attempt of ours that has not got far gives way to sharing that one.
void TcpTransport::reconsider_attempts(OutLink& link) {
  if (address_.incarnation <= link.address->incarnation) return;
  link.for_each_channel([&](OutChannel& channel) {
    if (channel.connector && find_shareable(channel) != nullptr) bury(std::move(channel.connector));
  });
  watch(link);
}

// --- who is asked ---

bool OutStream::on_share(const ShareMeta& share) {
  if (channel_->control.size() > kShareControlBytesMax) return reject("it does not read what we answer");
  OutLink& link = *channel_->link;
  Hello hello;
  hello.link_id = share.link_id;
  hello.channel = share.channel;
  hello.epoch = share.epoch;
  hello.resumes = share.resumes != 0;
  hello.sender = *link.address;
  if (static_cast<Lane>(share.channel & 1) != Lane::kSmall) return reject("a question for a lane that is not shared");
  SharedMeta answer{share.channel, share.epoch, 0};
  std::string text;
  if (const auto refusal = transport_->check_hello(hello)) {
    answer.code = static_cast<uint64_t>(refusal->code);
    text = refusal->text;
  } else {
    transport_->attach_incoming(hello, connection());
  }
  append_frame(channel_->control, FrameType::kShared, answer, text);
  transport_->mark_dirty(link);
  return true;
}

}  // namespace crossrail::tcp
