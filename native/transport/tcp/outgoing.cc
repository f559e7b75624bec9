// Our operations: queued at the link, taken by its channels, gathered into batches.
#include <algorithm>
#include <array>

#include "transport/tcp/frames.h"
#include "transport/tcp/tcp_transport.h"

namespace crossrail::tcp {

namespace {

constexpr size_t kReadsMax = 256;
// Asked for over one of several pairs of rails: a question is short, and the first to ask would ask for everything.
constexpr uint32_t kReadsAhead = 2;
constexpr uint64_t kReadBytesAhead = uint64_t{2} << 20;
// Shorter payloads are copied beside their heads: cheaper than an iovec of their own.
constexpr uint64_t kCopyBytesMax = 512;
// Bytes handed to the kernel at once.
constexpr uint64_t kBatchBytes = uint64_t{1} << 20;
// Where frames are short, their tables are so too.
constexpr uint64_t kBytesPerEntryMin = 64;

uint64_t region_of(const WorkRequest& request) {
  return request.remote == nullptr ? 0 : static_cast<const TcpKey*>(request.remote)->region_id;
}

WriteEntry entry_of(const WorkRequest& request, uint64_t offset, uint64_t length, bool ends) {
  return {.offset = request.remote_offset + offset,
          .length = static_cast<uint32_t>(length) | (request.has_imm && ends ? kHasImm : 0),
          .wire_imm = request.has_imm && ends ? request.wire_imm : 0};
}

}  // namespace

OutLink::OutLink(TcpTransport* transport, uint64_t id, std::shared_ptr<const Address> address,
                 std::vector<RailPair> pairs, uint32_t newest_epoch)
    : transport(transport), id(id), address(std::move(address)), pairs(std::move(pairs)), newest_epoch(newest_epoch) {
  channels.resize(2 * this->pairs.size());
  nobody_at.resize(this->pairs.size());
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
  if (link.messages.size() >= kMessagesUnderWayMax ||
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
  put_head(batch, FrameType::kMessage, 0, 1, MessageMeta{id}, length);
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

bool OutChannel::has_unplaced() const { return !sent.empty() || current || reads_open > 0; }

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

// Short writes to one region go into one frame.
size_t OutChannel::put_writes(TxBatch& batch, RingQueue<WorkRequest>& queue, size_t room) {
  const WorkRequest& first = queue.front();
  const int gpu = gpu_of(first);
  size_t count = 0;
  size_t views = 1;
  bool copying = true;  // what is copied in a row needs one view
  size_t copied = sizeof(FrameHeader) + sizeof(WriteMeta);
  uint64_t bytes = 0;
  const size_t limit = std::min<size_t>({queue.size(), kEntriesMax, room, frame_bytes / kBytesPerEntryMin});
  while (count < limit) {
    const WorkRequest& request = queue[count];
    if (request.op != WorkOp::kWrite || request.remote != first.remote || gpu_of(request) != gpu) break;
    if (count > 0 && (bytes + request.length_bytes > frame_bytes || resumed_at(request) > 0)) break;
    const bool copies = gpu < 0 && request.length_bytes <= kCopyBytesMax;
    const size_t more = sizeof(WriteEntry) + (copies ? request.length_bytes : 0);
    if (!batch.has_room(copied + more, views + 1)) break;
    copied += more;
    views += (copies && copying) || gpu >= 0 ? 0 : 1;
    copying = copies;
    bytes += request.length_bytes;
    ++count;
  }
  if (count == 0) return 0;
  std::byte* staged = nullptr;
  if (gpu >= 0 && bytes > 0) {
    device::Copier& copier = transport->connections().copier;
    staged = batch.stage(bytes);
    std::byte* at = staged;
    for (size_t i = 0; i < count; at += queue[i++].length_bytes)
      copier.begin(gpu, at, queue[i].local, queue[i].length_bytes);
    if (!copier.finish()) {
      put_failed(batch);
      return 1;
    }
  }
  std::array<WriteEntry, kEntriesMax> entries;  // written as far as used
  for (size_t i = 0; i < count; ++i) entries[i] = entry_of(queue[i], 0, queue[i].length_bytes, true);
  const auto table = std::as_bytes(std::span(entries).first(count));
  put_head(batch, FrameType::kWrite, count, count, WriteMeta{region_of(first)}, bytes, table);
  if (gpu >= 0) {
    batch.view(staged, bytes);
    return count;
  }
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

void OutChannel::put_part(TxBatch& batch) {
  const uint64_t length = std::min(current->length_bytes - current_offset, frame_bytes);
  const bool ends = current_offset + length == current->length_bytes;
  const std::byte* data = current->local + current_offset;
  if (const int gpu = gpu_of(*current); gpu >= 0) {
    std::byte* const staged = batch.stage(length);
    if (!transport->connections().copier.copy(gpu, staged, data, length)) {
      put_failed(batch);
      sent.push_back(*current);
      current.reset();
      return;
    }
    data = staged;
  }
  const WriteEntry entry = entry_of(*current, current_offset, length, ends);
  put_head(batch, FrameType::kWrite, 1, ends ? 1 : 0, WriteMeta{region_of(*current)}, length, object_bytes(entry));
  batch.view(data, length);
  current_offset += length;
  if (ends) {
    sent.push_back(*current);
    current.reset();
  }
}

void OutChannel::put_failed(TxBatch& batch) {
  put_head(batch, FrameType::kWrite, 1, 1, WriteMeta{0}, 0, object_bytes(WriteEntry{0, 0, 0}));
  // Unless the target has refused an earlier part of it.
  refusals.try_emplace(acked + sent.size() + 1,
                       Refusal{Status::kTransportFailed,
                               "our GPU's memory cannot be copied: " + transport->connections().copier.trouble()});
}

bool OutChannel::put_next(TxBatch& batch) {
  if (current) {
    if (!batch.has_room(kRangeHeadBytes, 2)) return false;
    put_part(batch);
    return true;
  }
  if (put_message(*this, batch)) return true;
  RingQueue<WorkRequest>* const queue = next_queue(*this);
  if (queue == nullptr) return false;
  const WorkRequest& request = queue->front();
  if (!should_take(request, queue->size())) return false;
  if (request.op == WorkOp::kService) {
    if (!batch.has_room(sizeof(FrameHeader) + request.length_bytes)) return false;
    batch.put(header_of(FrameType::kService, 0, 1, {request.local, request.length_bytes}, {}, 0));
    batch.copy(request.local, request.length_bytes);
    sent.push_back(queue->pop_front());
    --link->queued;
    return true;
  }
  if (request.op == WorkOp::kWrite) {
    if (request.length_bytes > frame_bytes || resumed_at(request) > 0) {
      pace.take(request.length_bytes, transport->now());
      current = queue->pop_front();
      current_offset = resumed_at(*current);
      --link->queued;
      return true;
    }
    const size_t count = put_writes(batch, *queue, kOperationsUnderWayMax - sent.size());
    for (size_t i = 0; i < count; ++i) {
      pace.take(queue->front().length_bytes, transport->now());
      sent.push_back(queue->pop_front());
    }
    link->queued -= count;
    return count > 0;
  }
  if (link->reads.size() >= kReadsMax || !batch.has_room(sizeof(FrameHeader) + sizeof(ReadMeta))) return false;
  const bool far_ahead = reads_open >= kReadsAhead && reads_bytes + request.length_bytes > kReadBytesAhead;
  if (far_ahead && link->pairs.size() > 1) return false;
  const uint64_t id = link->next_read_id++;
  const uint64_t resumed = resumed_at(request);
  const ReadMeta meta{region_of(request), request.remote_offset + resumed, request.length_bytes - resumed, id};
  put_head(batch, FrameType::kRead, 0, 1, meta, 0);
  link->reads[id] = {.request = request, .channel = index};
  ++reads_open;
  reads_bytes += request.length_bytes;
  pace.take(request.length_bytes, transport->now());
  sent.push_back(queue->pop_front());
  --link->queued;
  return true;
}

void OutChannel::fill(TxBatch& batch) {
  const size_t sent_before = sent.size();
  put_frames(batch, control);
  if (!control.empty()) return;
  const uint64_t others_bytes = batch.pending_bytes();
  while (!in_doubt && batch.pending_bytes() - others_bytes < kBatchBytes && sent.size() < kOperationsUnderWayMax) {
    const size_t before = sent.size();
    if (!put_next(batch)) break;
    if (sent.size() > before) batch.mark(acked + before + 1);
  }
  tell_sent(sent_before);
}

bool OutChannel::is_sent(uint64_t operation) const {
  if (operation > acked + sent.size()) return false;
  const TxBatch* const batch = is_open() ? stream->connection()->pending_batch() : nullptr;
  return batch == nullptr || operation < batch->first_unsent();
}

}  // namespace crossrail::tcp
