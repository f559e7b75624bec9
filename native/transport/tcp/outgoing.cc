// Our operations: queued at the link, taken on by its channels, gathered into batches.
#include <algorithm>
#include <array>
#include <utility>

#include "transport/tcp/frames.h"
#include "transport/tcp/tcp_transport.h"

namespace crossrail::tcp {

namespace {

constexpr size_t kReadsMax = 256;
// Reads requested at a time over one of several pairs of rails: a request is short, and the first channel would request
// everything.
constexpr uint32_t kReadsAhead = 2;
constexpr uint64_t kReadBytesAhead = uint64_t{2} << 20;
// Shorter payloads are copied next to their headers: cheaper than an iovec of their own.
constexpr uint64_t kCopyBytesMax = 512;
// Bytes handed to the kernel at once.
constexpr uint64_t kBatchBytes = uint64_t{1} << 20;
// If frames are short, so are their tables.
constexpr uint64_t kBytesPerEntryMin = 64;
// A connection that delivered less than this and fell silent may have carried no packet of full length.
constexpr uint64_t kLongBytesMin = 64 << 10;

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
  // Large work uses all pairs at once, small work the one connected first.
  if (rail == kAnyRail && lane == Lane::kSmall) return;
  for (uint32_t pair = 0; pair < pairs.size(); ++pair) {
    if (rail == kAnyRail || pairs[pair].rail == rail) channel(pair, lane).wanted = true;
  }
  transport->watch(*this);
  transport->tick_soon();
}

void OutLink::want_all(Lane lane) {
  bool any = false;
  for (uint32_t pair = 0; pair < pairs.size(); ++pair) any = !std::exchange(channel(pair, lane).wanted, true) || any;
  if (!any) return;
  transport->watch(*this);
  transport->tick_soon();
}

OutChannel& OutLink::channel(uint32_t pair, Lane lane) {
  auto& channel = channels[2 * pair + static_cast<uint32_t>(lane)];
  if (!channel) channel = std::make_unique<OutChannel>(transport, this, 2 * pair + static_cast<uint32_t>(lane));
  return *channel;
}

void OutLink::release_idle() {
  constexpr size_t kKeptMax = 64;
  const auto release = [](auto& queue) {
    if (queue.empty() && queue.capacity() > kKeptMax) queue.release();
  };
  for (auto& queue : queues) release(queue);
  release(sends);
  release(messages);
  for_each_channel([&](OutChannel& channel) { release(channel.sent); });
}

void OutLink::requeue(const WorkRequest& request) {
  auto& queue = request.op == WorkOp::kSend ? sends : this->queue(rail_of(request), lane_of(request));
  queue.push_front(request);
  ++queued;
}

namespace {

// The queue that this channel may take from next, or null. Each lane serves its own queues, and the other lane's while
// no channel of that lane is usable.
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

// Adds the next message, if this channel is to carry it and the peer has room.
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

bool OutChannel::passes_only_short() const {
  return has_unplaced() && std::max(carried_bytes, kernel_carried_bytes) < kLongBytesMin;
}

// A silent connection alone may mean an outage that ends as it is broken off. The next one shows: if it falls silent,
// too, it was a way that passes short packets only.
void OutChannel::note_silence() {
  if (has_short_segments || !passes_only_short()) return;
  has_short_segments = silent_epoch != 0;
  silent_epoch = epoch;
}

void OutChannel::forget_silence() {
  silent_epoch = 0;
  has_short_segments = false;
}

bool OutChannel::has_doubts() const {
  // The outcome of any message may have been in flight on this connection.
  return !sent.empty() || current || !link->messages.empty() ||
         std::any_of(link->reads.begin(), link->reads.end(),
                     [this](const auto& read) { return read.second.channel == index; });
}

// For work that is not pinned to a rail. The kernel's buffers let a slow rail take on more than its share, and in the
// end everything waits for that rail. A channel that holds back is asked again at the next acknowledgement; the one
// that would finish first never holds back.
class OutChannel::Turn {
 public:
  Turn(const OutChannel& channel, int64_t now) : channel_(channel), now_(now) {
    if (channel.link->pairs.size() == 1) return;
    is_one_of_several_ = true;
    const auto& queue = channel.link->queue(kAnyRail, channel.lane());
    if (!queue.empty()) look_at_others(waiting_bytes(queue), paced(queue[0]));
  }
  int64_t now() const { return now_; }
  // Whether to take this on. If so, it counts as taken.
  bool takes(const WorkRequest& next) {
    if (!is_one_of_several_ || rail_of(next) != kAnyRail) return true;
    const double bytes = paced(next);
    // If it is the only channel, or serves the other lane: as long as others are not connected yet.
    const bool yes = is_shared_ && lane_of(next) == channel_.lane() ? takes_of_all(bytes) : may_try(bytes);
    if (!yes) return false;
    taken_bytes_ += bytes;
    if (is_shared_) loads_[self_].ahead_bytes += bytes;
    return true;
  }

 private:
  // A channel whose rate is unknown could be slow: it takes on this much at most.
  static constexpr double kUnknownBytes = 256 << 10;
  // How far ahead a channel takes on work, beside two round trips, so that it is busy until its next acknowledgement.
  // It may have been measured at a moment of exceptional speed.
  static constexpr double kAheadNs = 2e7;
  // Work that one connection finishes this soon stays on it: several connections cost more CPU time, and small
  // operations share acknowledgements.
  static constexpr double kSoonSmallNs = 1e6;
  static constexpr double kSoonBulkNs = 2.5e5;
  static constexpr double kSoonUnknownBytes = 64 << 10;
  // An unknown rate is assumed to be higher than the known ones.
  static constexpr double kHope = 16;

  static double paced(const WorkRequest& request) { return static_cast<double>(paced_bytes(request.length_bytes)); }
  void look_at_others(double waiting_bytes, double next_bytes) {
    double most = 0;
    channel_.link->for_each_channel([&](const OutChannel& other) {
      if (other.lane() != channel_.lane() || !other.is_usable()) return;
      const auto ahead = static_cast<double>(other.pace.ahead_bytes());
      // A channel that would not take the work is not waited for.
      if (&other != &channel_ && !other.pace.is_known() && ahead > 0 && ahead + next_bytes > kUnknownBytes) return;
      if (&other == &channel_) self_ = count_;
      if (other.pace.is_known()) most = std::max(most, other.pace.rate(now_));
      others_[count_++] = &other;
    });
    if (count_ < 2) return;
    is_shared_ = true;
    const double hoped = most == 0 ? 1 : kHope * most;
    for (size_t i = 0; i < count_; ++i) {
      const Pace& pace = others_[i]->pace;
      const double told = pace.rate(now_);
      const double rate = pace.is_known() ? told : told == 0 ? hoped : std::min(told, hoped);
      loads_[i] = {.rate = rate,
                   .ahead_bytes = static_cast<double>(pace.ahead_bytes()) +
                                  (most == 0 ? 0 : rate * static_cast<double>(pace.round_trip_ns()))};
    }
    share_bytes_ = fair_share(loads(), self_, waiting_bytes);
  }
  bool takes_of_all(double bytes) const {
    if (!may_try(bytes)) return false;
    if (ahead_bytes() >= most_ahead_bytes()) return false;
    if (taken_bytes_ + bytes <= share_bytes_) return true;
    if (ahead_bytes() + bytes <= soon_bytes()) return true;
    return would_be_first(loads(), self_, bytes) || channel_.pace.is_to_be_tried(bytes, now_);
  }
  bool may_try(double bytes) const {
    return channel_.pace.is_known() || ahead_bytes() == 0 || ahead_bytes() + bytes <= kUnknownBytes;
  }
  double most_ahead_bytes() const {
    const auto round_trip_ns = static_cast<double>(channel_.pace.round_trip_ns());
    return std::max(kUnknownBytes, channel_.pace.rate(now_) * (2 * round_trip_ns + kAheadNs));
  }
  double ahead_bytes() const { return static_cast<double>(channel_.pace.ahead_bytes()) + taken_bytes_; }
  double soon_bytes() const {
    const bool is_small = channel_.lane() == Lane::kSmall;
    if (!channel_.pace.is_known()) return is_small ? kSoonUnknownBytes : 0;
    return channel_.pace.rate(now_) * (is_small ? kSoonSmallNs : kSoonBulkNs);
  }
  std::span<const Load> loads() const { return std::span(loads_).first(count_); }
  // For a long queue, estimated from its first works: it was posted by few transfers.
  static double waiting_bytes(const RingQueue<WorkRequest>& queue) {
    constexpr size_t kLooked = 64;
    const size_t looked = std::min(queue.size(), kLooked);
    double bytes = 0;
    for (size_t i = 0; i < looked; ++i) bytes += paced(queue[i]);
    return bytes / static_cast<double>(looked) * static_cast<double>(queue.size());
  }

  const OutChannel& channel_;
  const int64_t now_;
  bool is_one_of_several_ = false;
  bool is_shared_ = false;  // among several connected channels
  std::array<const OutChannel*, size_t{2} * kRailsMax> others_;
  std::array<Load, size_t{2} * kRailsMax> loads_;
  size_t count_ = 0;
  size_t self_ = 0;
  double share_bytes_ = 0;
  double taken_bytes_ = 0;
};

// Consecutive works of one transfer in `sent` are reported together.
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

// For a mapped file, the kernel takes the bytes, which reports a truncated file.
static bool is_copied(const WorkRequest& request) {
  const LocalRegion* const region = request.local_region;
  return request.length_bytes <= kCopyBytesMax && (region == nullptr || !region->maps_file);
}

// Short writes to one region share a frame.
size_t OutChannel::put_writes(TxBatch& batch, RingQueue<WorkRequest>& queue, size_t room, Turn& turn) {
  const WorkRequest& first = queue.front();
  const int gpu = gpu_of(first);
  size_t count = 0;
  size_t views = 1;
  bool copying = true;  // consecutive copied payloads need a single view
  size_t copied = sizeof(FrameHeader) + sizeof(WriteMeta);
  uint64_t bytes = 0;
  const size_t limit = std::min<size_t>({queue.size(), kEntriesMax, room, frame_bytes / kBytesPerEntryMin});
  while (count < limit) {
    const WorkRequest& request = queue[count];
    if (request.op != WorkOp::kWrite || request.remote != first.remote || gpu_of(request) != gpu) break;
    if (count > 0 && (bytes + request.length_bytes > frame_bytes || resumed_at(request) > 0)) break;
    const bool copies = gpu < 0 && is_copied(request);
    const size_t more = sizeof(WriteEntry) + (copies ? request.length_bytes : 0);
    if (!batch.has_room(copied + more, views + 1) || (count > 0 && !turn.takes(request))) break;
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
  std::array<WriteEntry, kEntriesMax> entries;  // initialised as far as used
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
    if (is_copied(request)) {
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

bool OutChannel::put_next(TxBatch& batch, Turn& turn) {
  if (current) {
    if (!batch.has_room(kRangeHeadBytes, 2)) return false;
    put_part(batch);
    return true;
  }
  if (put_message(*this, batch)) return true;
  RingQueue<WorkRequest>* const queue = next_queue(*this);
  if (queue == nullptr) return false;
  const WorkRequest& request = queue->front();
  if (!turn.takes(request)) return false;
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
      pace.take(paced_bytes(request.length_bytes), turn.now());
      current = queue->pop_front();
      current_offset = resumed_at(*current);
      --link->queued;
      return true;
    }
    const size_t count = put_writes(batch, *queue, kOperationsUnderWayMax - sent.size(), turn);
    uint64_t bytes = 0;
    for (size_t i = 0; i < count; ++i) {
      bytes += paced_bytes(queue->front().length_bytes);
      sent.push_back(queue->pop_front());
    }
    pace.take(bytes, turn.now());
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
  pace.take(paced_bytes(request.length_bytes), turn.now());
  sent.push_back(queue->pop_front());
  --link->queued;
  return true;
}

void OutChannel::put_recalls(TxBatch& batch) {
  bool has_more = false;
  for (size_t i = 0; i < link->messages.size(); ++i) {
    SentMessage& message = link->messages[i];
    if (!message.is_recalled || message.is_recall_sent || message.over) continue;
    // Before that, the message may arrive after the question.
    const bool is_there = message.operation <= link->channels[message.channel]->acked;
    if (is_there && batch.has_room(sizeof(FrameHeader) + sizeof(RecallMeta))) {
      put_frame(batch, FrameType::kRecall, RecallMeta{message.id});
      message.is_recall_sent = true;
    } else {
      has_more = true;
    }
  }
  link->has_recalls = has_more;
}

void OutChannel::fill(TxBatch& batch) {
  const size_t sent_before = sent.size();
  put_frames(batch, control);
  if (!control.empty()) return;
  if (link->has_recalls) put_recalls(batch);
  const uint64_t others_bytes = batch.pending_bytes();
  Turn turn(*this, pace_now());
  while (!doubt && batch.pending_bytes() - others_bytes < kBatchBytes && sent.size() < kOperationsUnderWayMax) {
    const size_t before = sent.size();
    if (!put_next(batch, turn)) break;
    if (sent.size() > before) batch.mark(acked + before + 1);
  }
  tell_sent(sent_before);
  if (lane() == Lane::kSmall && is_behind()) link->want_all(Lane::kSmall);
}

// transport->now() is of the start of a poll or of several. A worker that had to wait for its core in between would
// have sent and got acknowledged megabytes in no time.
int64_t OutChannel::pace_now() const { return link->pairs.size() > 1 ? now_ns() : transport->now(); }

void OutChannel::note_done(uint64_t paced) {
  const bool is_measured = pace.done(paced, pace_now());
  if (is_measured && link->pairs.size() > 1 && is_open())
    pace.set_round_trip(round_trip_ns(stream->connection()->fd()));
}

bool OutChannel::is_behind() const {
  constexpr uint64_t kBytes = 64 << 10;
  constexpr double kNs = 5e6;
  const auto ahead = static_cast<double>(pace.ahead_bytes());
  return pace.ahead_bytes() >= kBytes && ahead > kNs * pace.rate(transport->now()) && pace.rate(transport->now()) != 0;
}

bool OutChannel::is_sent(uint64_t operation) const {
  if (operation > acked + sent.size()) return false;
  const TxBatch* const batch = is_open() ? stream->connection()->pending_batch() : nullptr;
  return batch == nullptr || operation < batch->first_unsent();
}

}  // namespace crossrail::tcp
