// The initiator's side of a connection: operations out, acknowledgements and read data in.
#include <algorithm>
#include <array>
#include <cstring>

#include "transport/tcp/frames.h"
#include "transport/tcp/tcp_transport.h"

namespace crossrail::tcp {

namespace {

constexpr size_t kSentMax = kOperationsUnderWayMax;
constexpr size_t kReadsMax = 256;
constexpr size_t kMessagesMax = kMessagesUnderWayMax;
// Asked for over one of several pairs of rails: a question is short, and the first to ask would ask for everything.
constexpr uint32_t kReadsAhead = 2;
constexpr uint64_t kReadBytesAhead = uint64_t{2} << 20;
// Shorter payloads are copied beside their heads: cheaper than an iovec of their own.
constexpr uint64_t kCopyBytesMax = 512;
// Bytes handed to the kernel at once.
constexpr uint64_t kBatchBytes = uint64_t{1} << 20;

uint64_t region_of(const WorkRequest& request) {
  return request.remote == nullptr ? 0 : static_cast<const TcpKey*>(request.remote)->region_id;
}

WriteEntry entry_of(const WorkRequest& request, uint64_t offset, uint64_t length, bool ends) {
  return {.offset = request.remote_offset + offset,
          .length = static_cast<uint32_t>(length) | (request.has_imm && ends ? kHasImm : 0),
          .wire_imm = request.has_imm && ends ? request.wire_imm : 0};
}

// As many of the first requests as one frame takes: short writes to one region. Returns how many.
size_t put_writes(TxBatch& batch, RingQueue<WorkRequest>& queue, size_t room) {
  const WorkRequest& first = queue.front();
  size_t count = 0;
  size_t views = 1;
  bool copying = true;  // what is copied in a row needs one view
  size_t copied = sizeof(FrameHeader) + sizeof(WriteMeta);
  uint64_t bytes = 0;
  const size_t limit = std::min<size_t>({queue.size(), kEntriesMax, room});
  while (count < limit) {
    const WorkRequest& request = queue[count];
    if (request.op != WorkOp::kWrite || request.remote != first.remote) break;
    if (count > 0 && bytes + request.length_bytes > kFrameBytesMax) break;
    const bool copies = request.length_bytes <= kCopyBytesMax;
    const size_t more = sizeof(WriteEntry) + (copies ? request.length_bytes : 0);
    if (!batch.has_room(copied + more, views + 1)) break;
    copied += more;
    views += copies && copying ? 0 : 1;
    copying = copies;
    bytes += request.length_bytes;
    ++count;
  }
  if (count == 0) return 0;
  batch.put(header_of(FrameType::kWrite, count, count, sizeof(WriteMeta) + count * sizeof(WriteEntry), bytes));
  batch.put(WriteMeta{region_of(first)});
  std::array<WriteEntry, kEntriesMax> entries;  // written as far as used
  for (size_t i = 0; i < count; ++i) entries[i] = entry_of(queue[i], 0, queue[i].length_bytes, true);
  batch.copy(entries.data(), count * sizeof(WriteEntry));
  for (size_t i = 0; i < count; ++i) {
    const WorkRequest& request = queue[i];
    if (request.length_bytes == 0) continue;
    if (request.length_bytes <= kCopyBytesMax) {
      batch.copy(request.local, request.length_bytes);
    } else {
      batch.view(request.local, request.length_bytes);
    }
  }
  return count;
}

}  // namespace

OutLink::OutLink(TcpTransport* transport, uint64_t id, std::shared_ptr<const Address> address,
                 std::vector<RailPair> pairs)
    : transport(transport), id(id), address(std::move(address)), pairs(std::move(pairs)) {
  channels.resize(2 * this->pairs.size());
  queues.resize(2 * (size_t{transport->traits().rail_count} + 1));
  wanted.resize(queues.size());
}

bool OutLink::reaches(uint32_t rail) const {
  return std::any_of(pairs.begin(), pairs.end(), [&](const RailPair& pair) { return pair.rail == rail; });
}

void OutLink::want(uint32_t rail, Lane lane) {
  const size_t index = 2 * (rail == kAnyRail ? 0 : size_t{rail} + 1) + static_cast<size_t>(lane);
  if (wanted[index]) return;
  wanted[index] = true;
  // Large work goes over all pairs at once, small work over the one connected first.
  if (rail == kAnyRail && lane == Lane::kSmall) return;
  for (uint32_t pair = 0; pair < pairs.size(); ++pair) {
    if (rail == kAnyRail || pairs[pair].rail == rail) channel(pair, lane).wanted = true;
  }
  transport->watch(*this);
  transport->tick_soon();
}

OutChannel& OutLink::channel(uint32_t pair, Lane lane) {
  auto& channel = channels[2 * pair + static_cast<uint32_t>(lane)];
  if (!channel) channel = std::make_unique<OutChannel>(transport, this, 2 * pair + static_cast<uint32_t>(lane));
  return *channel;
}

void OutLink::requeue(const WorkRequest& request) {
  auto& queue = request.op == WorkOp::kSend ? sends : this->queue(rail_of(request), lane_of(request));
  queue.push_front(request);
  ++queued;
}

OutStream::OutStream(TcpTransport* transport, OutChannel* channel, std::shared_ptr<Connection> connection)
    : Stream(Role::kInitiator, std::move(connection)), transport_(transport), channel_(channel) {}

void OutStream::fill(TxBatch& batch) {
  channel_->fill(batch);
  if (!batch.empty() && channel_->lane() == Lane::kSmall) transport_->put_rider_acks(*channel_->link, batch);
}

void OutStream::on_turn_over() { transport_->mark_dirty(*channel_->link); }

// --- out ---

namespace {

// The queue that this channel may take from next, or null. Each lane serves its own queues; the other's too while none of
// those that should is usable.
RingQueue<WorkRequest>* next_queue(OutChannel& channel) {
  OutLink& link = *channel.link;
  const uint32_t rail = link.pairs[channel.pair()].rail;
  const auto other_serves = [&](Lane lane, bool pinned) {
    bool serves = false;
    link.for_each_channel([&](OutChannel& other) {
      serves =
          serves || (other.lane() == lane && other.is_usable() && (!pinned || link.pairs[other.pair()].rail == rail));
    });
    return serves;
  };
  for (const Lane lane : {channel.lane(), channel.lane() == Lane::kSmall ? Lane::kBulk : Lane::kSmall}) {
    for (const bool pinned : {true, false}) {
      auto& queue = link.queue(pinned ? rail : kAnyRail, lane);
      if (queue.empty()) continue;
      if (lane != channel.lane() && other_serves(lane, pinned)) continue;
      return &queue;
    }
  }
  return nullptr;
}

// The next message, if this channel is to carry it and the peer has room.
bool put_message(OutChannel& channel, TxBatch& batch) {
  OutLink& link = *channel.link;
  if (link.sends.empty()) return false;
  const uint64_t length = link.sends.front().length_bytes;
  if (link.messages.size() >= kMessagesMax ||
      (link.messages_bytes > 0 && link.messages_bytes + length > channel.transport->message_window_bytes()) ||
      !batch.has_room(sizeof(FrameHeader) + sizeof(MessageMeta) + kCopyBytesMax, 2))
    return false;
  if (channel.lane() == Lane::kBulk) {
    bool small = false;
    link.for_each_channel(
        [&](OutChannel& other) { small = small || (other.lane() == Lane::kSmall && other.is_usable()); });
    if (small) return false;
  }
  const WorkRequest request = link.sends.pop_front();
  --link.queued;
  const uint64_t id = link.first_message_id + link.messages.size();
  batch.put(header_of(FrameType::kMessage, 0, 1, sizeof(MessageMeta), length));
  batch.put(MessageMeta{id});
  if (length > kCopyBytesMax) {
    batch.view(request.local, length);
  } else if (length > 0) {
    batch.copy(request.local, length);
  }
  channel.sent.push_back(request);
  link.messages.push_back(
      {.request = request, .id = id, .operation = channel.acked + channel.sent.size(), .channel = channel.index});
  link.messages_bytes += length;
  return true;
}

}  // namespace

bool OutChannel::has_doubts() const {
  // What became of any message may have been on its way over this connection.
  return !sent.empty() || current || !link->messages.empty() ||
         std::any_of(link->reads.begin(), link->reads.end(),
                     [this](const auto& read) { return read.second.channel == index; });
}

// The kernel's buffers let a slow rail take on more than its share when the end is near, and then all others wait for it. It
// stands back once it would be done later than all of what is left over all rails, unless no other would be done sooner.
// Who stood back is asked again at the next acknowledgement; the one that would be done first never does.
bool OutChannel::should_take(const WorkRequest& next, size_t queued) const {
  const uint64_t length = next.length_bytes;
  const int64_t now = transport->now();
  if (length < kPacedBytes || link->pairs.size() == 1 || rail_of(next) != kAnyRail || pace.rate(now) == 0) return true;
  double rate = 0;
  double soonest_ns = pace.ns_with(length);
  uint64_t left_bytes = queued * length;
  bool all_known = true;
  link->for_each_channel([&](const OutChannel& other) {
    if (other.lane() != lane() || !other.is_usable()) return;
    all_known = all_known && other.pace.rate(now) != 0;
    rate += other.pace.rate(now);
    left_bytes += other.pace.ahead_bytes();
    soonest_ns = std::min(soonest_ns, other.pace.ns_with(length));
  });
  return !all_known || pace.ns_with(length) <= std::max(soonest_ns, static_cast<double>(left_bytes) / rate);
}

// Works of one transfer that follow each other in `sent` are told together.
void OutChannel::tell_sent(size_t first) {
  for (size_t i = first; i < sent.size();) {
    void* const context = sent[i].context;
    uint32_t count = 0, imms = 0;
    uint64_t bytes = 0;
    for (; i < sent.size() && sent[i].context == context; ++i, ++count) {
      bytes += sent[i].length_bytes;
      imms += sent[i].has_imm ? 1 : 0;
    }
    transport->sink().on_sent(*link, link->pairs[pair()].rail, context, count, bytes, imms);
  }
}

void OutChannel::fill(TxBatch& batch) {
  const size_t sent_before = sent.size();
  if (!control.empty()) {
    batch.copy(control.data(), control.size());
    control.clear();
  }
  const uint64_t others_bytes = batch.pending_bytes();
  while (!in_doubt && batch.pending_bytes() - others_bytes < kBatchBytes && sent.size() < kSentMax) {
    if (current) {
      if (!batch.has_room(kRangeHeadBytes, 2)) break;
      const uint64_t length = std::min(current->length_bytes - current_offset, kFrameBytesMax);
      const bool ends = current_offset + length == current->length_bytes;
      batch.put(header_of(FrameType::kWrite, 1, ends ? 1 : 0, sizeof(WriteMeta) + sizeof(WriteEntry), length));
      batch.put(WriteMeta{region_of(*current)});
      batch.put(entry_of(*current, current_offset, length, ends));
      batch.view(current->local + current_offset, length);
      current_offset += length;
      if (ends) {
        sent.push_back(*current);
        current.reset();
      }
      continue;
    }
    if (put_message(*this, batch)) continue;
    RingQueue<WorkRequest>* const queue = next_queue(*this);
    if (queue == nullptr) break;
    const WorkRequest& request = queue->front();
    if (!should_take(request, queue->size())) break;
    if (request.op == WorkOp::kService) {
      if (!batch.has_room(sizeof(FrameHeader) + request.length_bytes)) break;
      batch.put(header_of(FrameType::kService, 0, 1, 0, request.length_bytes));
      batch.copy(request.local, request.length_bytes);
      sent.push_back(queue->pop_front());
      --link->queued;
      continue;
    }
    if (request.op == WorkOp::kWrite) {
      if (request.length_bytes > kFrameBytesMax) {
        pace.take(request.length_bytes, transport->now());
        current = queue->pop_front();
        current_offset = 0;
        --link->queued;
        continue;
      }
      const size_t count = put_writes(batch, *queue, kSentMax - sent.size());
      if (count == 0) break;
      for (size_t i = 0; i < count; ++i) {
        pace.take(queue->front().length_bytes, transport->now());
        sent.push_back(queue->pop_front());
      }
      link->queued -= count;
    } else {
      if (link->reads.size() >= kReadsMax || !batch.has_room(sizeof(FrameHeader) + sizeof(ReadMeta))) break;
      const bool far_ahead = reads_open >= kReadsAhead && reads_bytes + request.length_bytes > kReadBytesAhead;
      if (far_ahead && link->pairs.size() > 1) break;
      const uint64_t id = link->next_read_id++;
      batch.put(header_of(FrameType::kRead, 0, 1, sizeof(ReadMeta), 0));
      batch.put(ReadMeta{region_of(request), request.remote_offset, request.length_bytes, id});
      link->reads[id] = {.request = request, .channel = index};
      ++reads_open;
      reads_bytes += request.length_bytes;
      pace.take(request.length_bytes, transport->now());
      sent.push_back(queue->pop_front());
      --link->queued;
    }
  }
  tell_sent(sent_before);
}

// --- in ---

namespace {

// Operations up to `placed` are over. Neighbours of one transfer are retired together.
void on_acked(TcpTransport& transport, OutChannel& channel, uint64_t placed) {
  OutLink& link = *channel.link;
  channel.moved_ns = transport.now();
  while (channel.acked < placed) {
    const WorkRequest request = channel.sent.pop_front();
    const uint64_t operation = ++channel.acked;
    if (request.op == WorkOp::kService) {
      transport.retire(link, request, Status::kDone, {});
      continue;
    }
    if (request.op != WorkOp::kWrite) continue;  // messages end when taken, reads when their data is here
    channel.pace.done(request.length_bytes, transport.now());
    const auto refused = std::find_if(channel.refusals.begin(), channel.refusals.end(),
                                      [&](const auto& refusal) { return refusal.operation == operation; });
    if (refused != channel.refusals.end()) {
      transport.retire(link, request, refused->status, refused->text);
      channel.refusals.erase(refused);
      continue;
    }
    uint32_t count = 1;
    uint64_t bytes = request.length_bytes;
    while (channel.refusals.empty() && channel.acked < placed && channel.sent.front().op == WorkOp::kWrite &&
           channel.sent.front().context == request.context && channel.sent.front().tag == request.tag) {
      const uint64_t length = channel.sent.pop_front().length_bytes;
      channel.pace.done(length, transport.now());
      bytes += length;
      ++channel.acked;
      ++count;
    }
    channel.bytes_acked += bytes;
    link.end(count, transport.now());
    transport.sink().on_over(link, link.pairs[channel.pair()].rail, request.context, count, bytes);
    transport.sink().on_retired(link, request.context, request.tag, count, bytes, Status::kDone, {});
  }
  if (channel.sent.empty() && channel.sent.capacity() > 64) channel.sent.release();
}

void end_message(TcpTransport& transport, OutLink& link, SentMessage& message, Status status, const std::string& text) {
  if (std::exchange(message.over, true)) return;
  link.messages_bytes -= message.request.length_bytes;
  if (status == Status::kDone) {
    const uint32_t rail = link.pairs[link.channels[message.channel]->pair()].rail;
    transport.sink().on_over(link, rail, message.request.context, 1, message.request.length_bytes);
  }
  transport.retire(link, message.request, status, text);
}

void forget_ended_messages(OutLink& link) {
  while (!link.messages.empty() && link.messages.front().over) {
    link.messages.pop_front();
    ++link.first_message_id;
  }
}

SentMessage* find_message(OutLink& link, uint64_t id) {
  if (id < link.first_message_id || id - link.first_message_id >= link.messages.size()) return nullptr;
  return &link.messages[id - link.first_message_id];
}

// The peer says how much of a broken channel's it has placed. The rest goes out anew, over whatever is usable.
void on_resolved(TcpTransport& transport, OutChannel& channel, uint64_t placed) {
  OutLink& link = *channel.link;
  on_acked(transport, channel, placed);
  std::vector<WorkRequest> again;
  // Reads whose data was to come over the broken connection.
  for (auto read = link.reads.begin(); read != link.reads.end();) {
    if (read->second.channel == channel.index) {
      again.push_back(read->second.request);
      read = link.reads.erase(read);
    } else {
      ++read;
    }
  }
  channel.reads_open = 0;
  channel.reads_bytes = 0;
  channel.pace.drop();
  if (channel.current) again.push_back(*channel.current);
  channel.current.reset();
  for (size_t i = channel.sent.size(); i > 0; --i) {
    const WorkOp op = channel.sent[i - 1].op;
    if (op == WorkOp::kWrite || op == WorkOp::kService) again.push_back(channel.sent[i - 1]);
  }
  // Messages go out under new ids. What became of those that were placed is told anyway.
  for (size_t i = link.messages.size(); i > 0; --i) {
    SentMessage& message = link.messages[i - 1];
    if (message.over || message.channel != channel.index || message.operation <= placed) continue;
    message.over = true;
    link.messages_bytes -= message.request.length_bytes;
    again.push_back(message.request);
  }
  forget_ended_messages(link);
  channel.sent.clear();
  channel.refusals.clear();
  for (const WorkRequest& request : again) link.requeue(request);
  if (!again.empty())
    transport.sink().on_sent_again(link, link.pairs[channel.pair()].rail, static_cast<uint32_t>(again.size()));
  channel.in_doubt = false;
  channel.asked_through = nullptr;
  transport.mark_dirty(link);
}

}  // namespace

void pair_twins(OutLink& out, InLink& in) {
  if (out.twin != nullptr) out.twin->twin = nullptr;
  if (in.twin != nullptr) in.twin->twin = nullptr;
  out.twin = &in;
  in.twin = &out;
}

// Whether that is a peer's to say: that our engine is closed, say, is not.
static bool is_refusal(uint64_t status) {
  return status >= static_cast<uint64_t>(Status::kRegionClosed) &&
         status <= static_cast<uint64_t>(Status::kMessageTooLong);
}

bool take_ack(OutLink& link, const AckMeta& ack) {
  OutChannel* channel = ack.channel < link.channels.size() ? link.channels[ack.channel].get() : nullptr;
  if (channel == nullptr || ack.placed > channel->acked + channel->sent.size()) return false;
  // Refusals may have been lost with the connection that broke: the answer to our question brings them, and says as much.
  if (channel->in_doubt) return true;
  on_acked(*link.transport, *channel, ack.placed);
  if (link.queued > 0) link.transport->mark_dirty(link);
  return true;
}

bool take_taken(OutLink& link, const TakenMeta& taken) {
  if (taken.count > kMessagesMax) return false;
  for (uint64_t id = taken.first_id; id < taken.first_id + taken.count; ++id) {
    if (SentMessage* message = find_message(link, id)) end_message(*link.transport, link, *message, Status::kDone, {});
  }
  forget_ended_messages(link);
  if (link.queued > 0) link.transport->mark_dirty(link);
  return true;
}

bool OutStream::on_head(const FrameHeader& header, std::span<const std::byte> meta, Placement& place) {
  OutLink& link = *channel_->link;
  const auto type = static_cast<FrameType>(header.type);
  const auto malformed = [&] { return reject("a malformed frame of type " + std::to_string(header.type)); };
  // A read's data comes over the connection that asked for it: nothing else may end it while its data is arriving.
  const auto find_read = [&](uint64_t id) {
    const auto read = link.reads.find(id);
    return read == link.reads.end() || read->second.channel != channel_->index || channel_->in_doubt ? link.reads.end()
                                                                                                     : read;
  };
  read_id_ = 0;
  channel_->moved_ns = transport_->now();
  if (type != FrameType::kReadData && header.payload_bytes != 0) return malformed();
  switch (type) {
    case FrameType::kAck: {
      if (meta.size() != sizeof(AckMeta)) return malformed();
      const auto ack = read_meta<AckMeta>(meta);
      // An acknowledgement of a link that ended meanwhile says nothing any more.
      OutLink* const out = ack.link_id == link.id ? &link : transport_->find_out(*link.address, ack.link_id);
      return out == nullptr || take_ack(*out, ack) || reject("an acknowledgement of what was never sent");
    }
    case FrameType::kTaken: {
      if (meta.size() != sizeof(TakenMeta)) return malformed();
      const auto taken = read_meta<TakenMeta>(meta);
      OutLink* const out = taken.link_id == link.id ? &link : transport_->find_out(*link.address, taken.link_id);
      return out == nullptr || take_taken(*out, taken) || malformed();
    }
    case FrameType::kRefused: {
      if (meta.size() < sizeof(RefusedMeta)) return malformed();
      const auto refused = read_meta<RefusedMeta>(meta);
      if (!is_refusal(refused.status)) return malformed();
      const auto status = static_cast<Status>(refused.status);
      const std::string text = text_of(meta.subspan(sizeof refused));
      if (refused.channel == kMessageRefused) {
        if (SentMessage* message = find_message(link, refused.operation)) {
          end_message(*transport_, link, *message, status, text);
        }
        forget_ended_messages(link);
        if (link.queued > 0) transport_->mark_dirty(link);
        return true;
      }
      OutChannel* channel = refused.channel < link.channels.size() ? link.channels[refused.channel].get() : nullptr;
      if (channel == nullptr || refused.operation > channel->acked + channel->sent.size() + 1) return malformed();
      if (refused.operation > channel->acked && channel->refusals.size() <= kSentMax) {
        channel->refusals.push_back({refused.operation, status, text});
      }
      return true;
    }
    case FrameType::kResolved: {
      if (meta.size() != sizeof(ResolvedMeta)) return malformed();
      const auto resolved = read_meta<ResolvedMeta>(meta);
      OutChannel* channel = resolved.channel < link.channels.size() ? link.channels[resolved.channel].get() : nullptr;
      if (channel == nullptr) return malformed();
      if (!channel->in_doubt || channel->asked_through != channel_) return true;  // an answer that came twice
      if (resolved.placed < channel->acked || resolved.placed > channel->acked + channel->sent.size()) {
        return reject("it claims to have placed operations that were never sent");
      }
      on_resolved(*transport_, *channel, resolved.placed);
      return true;
    }
    case FrameType::kReadData: {
      if (meta.size() != sizeof(ReadDataMeta)) return malformed();
      const auto data = read_meta<ReadDataMeta>(meta);
      const auto read = find_read(data.read_id);
      if (read == link.reads.end()) return reject("data of a read that was never asked for");
      const uint64_t length = read->second.request.length_bytes;
      if (data.offset > length || header.payload_bytes > length - data.offset)
        return reject("more data than was asked for");
      place.add(read->second.request.local + data.offset, header.payload_bytes);
      read_id_ = data.read_id;
      read_bytes_ = header.payload_bytes;
      return true;
    }
    case FrameType::kReadEnd: {
      if (meta.size() < sizeof(ReadEndMeta)) return malformed();
      const auto end = read_meta<ReadEndMeta>(meta);
      const auto read = find_read(end.read_id);
      const bool is_done = end.status == static_cast<uint64_t>(Status::kDone);
      if (read == link.reads.end() || !(is_done || is_refusal(end.status))) return malformed();
      const PendingRead pending = read->second;
      const auto status = static_cast<Status>(end.status);
      if (is_done && pending.received_bytes != pending.request.length_bytes) return malformed();
      link.reads.erase(read);
      OutChannel& asked = *link.channels[pending.channel];
      --asked.reads_open;
      asked.reads_bytes -= pending.request.length_bytes;
      asked.pace.done(pending.request.length_bytes, transport_->now());
      if (is_done) {
        transport_->sink().on_over(link, link.pairs[asked.pair()].rail, pending.request.context, 1,
                                   pending.request.length_bytes);
      }
      transport_->retire(link, pending.request, status, text_of(meta.subspan(sizeof end)));
      if (link.queued > 0) transport_->mark_dirty(link);
      return true;
    }
    case FrameType::kPong:
      if (meta.size() != sizeof(PingMeta)) return malformed();
      return true;
    case FrameType::kClosing:
      if (!link.doom) link.doom.emplace(text_of(meta), true);
      transport_->watch(link);
      return true;
    case FrameType::kShare:
      return meta.size() == sizeof(ShareMeta) ? on_share(read_meta<ShareMeta>(meta)) : malformed();
    case FrameType::kWrite:
    case FrameType::kRead:
    case FrameType::kMessage:
    case FrameType::kResolve:
    case FrameType::kPing:
    case FrameType::kBye:
    case FrameType::kShared:
    case FrameType::kService:
      return reject("a frame that does not belong here");
  }
  return malformed();
}

bool OutStream::on_frame() {
  if (read_id_ == 0) return true;
  const auto read = channel_->link->reads.find(std::exchange(read_id_, 0));
  if (read != channel_->link->reads.end()) read->second.received_bytes += read_bytes_;
  return true;
}

}  // namespace crossrail::tcp
