// The acceptor's side of a connection: operations in, acknowledgements and read data out. Everything that arrives is
// untrusted: region, access and bounds of every operation are checked before a byte of it is placed.
#include <algorithm>
#include <cstring>

#include "transport/tcp/frames.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/wire_imm.h"
#include "util/readable.h"

namespace crossrail::tcp {

namespace {

constexpr size_t kQueuedReadsMax = 1024;  // per connection; an honest initiator stays below
constexpr size_t kHeldMax = 2048;         // messages that nobody takes; likewise
// Frames that the initiator does not read. An honest one may have a refusal with its text for everything outstanding.
constexpr size_t kControlBytesMax = 8 << 20;
static_assert(kControlBytesMax > kOperationsUnderWayMax * (sizeof(FrameHeader) + sizeof(RefusedMeta) + kTextBytesMax));
// Acknowledged at once: operations that an initiator with a full window may be waiting for.
constexpr uint64_t kAckAtOnceBytes = 16 << 10;
constexpr uint64_t kAckAtOnceOperations = 64;
constexpr uint64_t kAnsweredBatchBytes = uint64_t{1} << 20;

std::string range_text(uint64_t region_id, uint64_t offset, uint64_t length) {
  return "region " + std::to_string(region_id) + ", offset " + std::to_string(offset) + ", " + std::to_string(length) +
         " bytes";
}

// What the target answers to an operation on this range of an open region.
Status check(const RegionUse& region, Access needed, uint64_t offset, uint64_t length) {
  if (!allows(region->access, needed)) return Status::kAccessDenied;
  if (!fits(offset, length, region->length_bytes)) return Status::kOutOfBounds;
  return Status::kDone;
}

std::string why_refused(Status status, const RegionUse& region, uint64_t region_id, uint64_t offset, uint64_t length) {
  const std::string range = range_text(region_id, offset, length);
  if (status == Status::kOutOfBounds)
    return range + ": past the region's end at " + std::to_string(region->length_bytes);
  if (status == Status::kAccessDenied) return range + ": its owner did not open it to this operation";
  if (status == Status::kRegionRevoked) return range + ": the region was revoked";
  return range + ": the region is closed, or never existed";
}

}  // namespace

InStream::InStream(TcpTransport* transport, InChannel* channel, std::shared_ptr<Connection> connection)
    : Stream(Role::kAcceptor, std::move(connection)),
      transport_(transport),
      channel_(channel),
      epoch_(channel->epoch_min) {}

Status InStream::check_range(const RegionUse& region, uint64_t region_id, Access needed, uint64_t offset,
                             uint64_t length) {
  if (!region || region.is_revoked()) return transport_->sink().status_of_gone(region_id);
  return check(region, needed, offset, length);
}

void InStream::refuse(uint64_t operation, Status status, const std::string& text) {
  channel_->newest_refused = std::max(channel_->newest_refused, operation);
  append_frame(channel_->control, FrameType::kRefused,
               RefusedMeta{operation, channel_->index, static_cast<uint32_t>(status)}, text);
  auto& refusals = channel_->refusals;
  refusals.push_back({operation, status, text});
  // The initiator has sent this operation only after it was told about those.
  while (refusals.front().operation + kOperationsUnderWayMax < operation) refusals.pop_front();
  transport_->ack_later(*channel_->link, true);
}

bool InStream::on_head(const FrameHeader& header, std::span<const std::byte> meta, Placement& place) {
  InLink& link = *channel_->link;
  type_ = static_cast<FrameType>(header.type);
  operations_ = header.operations;
  if (channel_->control.size() > kControlBytesMax) return reject("it does not read what we answer");
  const bool has_payload = type_ == FrameType::kWrite || type_ == FrameType::kMessage;
  if (!has_payload && header.payload_bytes != 0) return reject_malformed(type_);
  switch (type_) {
    case FrameType::kWrite:
      return on_write(header, meta, place);
    case FrameType::kRead:
      return on_read(header, meta);
    case FrameType::kMessage:
      return on_message(header, meta, place);
    case FrameType::kService:
      if (operations_ != 1 || meta.size() > kServiceBytesMax) return reject_malformed(type_);
      message_.resize(meta.size());
      std::ranges::transform(meta, message_.begin(), [](std::byte byte) { return static_cast<uint8_t>(byte); });
      return true;
    case FrameType::kResolve:
      if (meta.size() != sizeof(ResolveMeta)) return reject_malformed(type_);
      return on_resolve(read_meta<ResolveMeta>(meta));
    case FrameType::kRecall:
      if (meta.size() != sizeof(RecallMeta)) return reject_malformed(type_);
      transport_->recall(link, read_meta<RecallMeta>(meta).message_id);
      return true;
    case FrameType::kPing:
      if (meta.size() != sizeof(PingMeta)) return reject_malformed(type_);
      append_frame(channel_->control, FrameType::kPong, read_meta<PingMeta>(meta));
      transport_->ack_later(link, true);
      return true;
    case FrameType::kAck: {  // about operations that we sent to this peer: it rides along
      if (meta.size() != sizeof(AckMeta)) return reject_malformed(type_);
      const auto ack = read_meta<AckMeta>(meta);
      // An acknowledgement for a link that has ended meanwhile means nothing any more.
      OutLink* const out = link.twin != nullptr && link.twin->id == ack.link_id
                               ? link.twin
                               : transport_->find_out(*link.peer, ack.link_id);
      return out == nullptr || take_ack(*out, ack) || reject("an acknowledgement of what was never sent");
    }
    case FrameType::kTaken: {  // likewise
      if (meta.size() != sizeof(TakenMeta)) return reject_malformed(type_);
      const auto taken = read_meta<TakenMeta>(meta);
      OutLink* const out = transport_->find_out(*link.peer, taken.link_id);
      return out == nullptr || take_taken(*out, taken) || reject_malformed(type_);
    }
    case FrameType::kBye:
      link.over = true;
      leave("the peer ended the link: " + text_of(meta));
      return true;
    case FrameType::kRefused:
    case FrameType::kResolved:
    case FrameType::kReadData:
    case FrameType::kReadEnd:
    case FrameType::kPong:
    case FrameType::kClosing:
    case FrameType::kShare:
    case FrameType::kShared:
      return reject("a frame that only acceptors send");
  }
  return reject_malformed(type_);
}

bool InStream::on_frame() {
  switch (type_) {
    case FrameType::kWrite:
      return finish_write();
    case FrameType::kMessage:
      return finish_message();
    case FrameType::kService:
      transport_->sink().on_service(channel_->link->peer, message_);
      ++channel_->placed;
      transport_->ack_later(*channel_->link, true);
      return true;
    default:  // no payload: handled with the header
      return true;
  }
}

// --- writes ---

bool InStream::on_write(const FrameHeader& header, std::span<const std::byte> meta, Placement& place) {
  const size_t count = header.count;
  if (count == 0 || count > kEntriesMax || meta.size() != sizeof(WriteMeta) + count * sizeof(WriteEntry))
    return reject("a write whose table does not fit its head");
  if (operations_ != count && !(count == 1 && operations_ == 0)) return reject("a write that ends what did not begin");
  const uint64_t region_id = region_id_ = read_meta<WriteMeta>(meta).region_id;
  region_closed_ = false;
  entries_.resize(count);
  std::memcpy(entries_.data(), meta.data() + sizeof(WriteMeta), count * sizeof(WriteEntry));
  statuses_.clear();
  region_ = region_id == 0 ? RegionUse() : transport_->regions().use(region_id);
  place.aim_at(region_ ? region_.operator->() : nullptr);
  uint64_t total = 0;
  for (size_t i = 0; i < count; ++i) {
    const WriteEntry& entry = entries_[i];
    const uint64_t length = entry.length & ~kHasImm;
    total += length;
    const bool is_bare = region_id == 0 && length == 0;
    const Status status =
        is_bare ? Status::kDone : check_range(region_, region_id, Access::kRemoteWrite, entry.offset, length);
    if (status == Status::kDone) {
      if (length > 0) place.add(region_->base + entry.offset, length);
      continue;
    }
    place.add_discard(length);
    if (statuses_.empty()) statuses_.assign(count, Status::kDone);
    statuses_[i] = status;
    if (!(operation_refused_ && i == 0)) {
      refuse(channel_->placed + i + 1, status, why_refused(status, region_, region_id, entry.offset, length));
    }
  }
  if (total != header.payload_bytes) return reject("a write whose table does not fit its payload");
  return true;
}

bool InStream::finish_write() {
  // The region was closed while its bytes were in flight.
  const bool closed = region_closed_ || region_.is_revoked();
  const Placement& placement = connection()->placement();
  size_t target = 0;  // counts entries with bytes
  uint32_t imm = 0;
  uint64_t units = 0;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const WriteEntry& entry = entries_[i];
    const uint64_t length = entry.length & ~kHasImm;
    bool good = statuses_.empty() || statuses_[i] == Status::kDone;
    const bool is_lost = length > 0 && placement.is_lost(target++);
    if (good && (closed || is_lost)) {
      good = false;
      if (!(operation_refused_ && i == 0)) {
        const Status status = closed ? transport_->sink().status_of_gone(region_id_) : Status::kTransportFailed;
        refuse(channel_->placed + i + 1, status,
               closed ? why_refused(status, region_, region_id_, entry.offset, length)
               : region_->gpu < 0
                   ? std::string("the target's ") + kUnwritableText
                   : "the target cannot copy it to its GPU: " + transport_->connections().copier.trouble());
      }
    }
    if (i == 0) good = good && !operation_refused_;
    if (operations_ == 0) {
      operation_refused_ = !good;
      begun_bytes_ = good ? begun_bytes_ + length : 0;
      channel_->begun_bytes = begun_bytes_;
      channel_->begun_epoch = epoch_;
      break;
    }
    if (i == 0) operation_refused_ = false;
    if (!good || (entry.length & kHasImm) == 0) continue;
    if (units > 0 && imm != imm_of_wire(entry.wire_imm)) {
      transport_->sink().on_imm(imm, units);
      units = 0;
    }
    imm = imm_of_wire(entry.wire_imm);
    units += units_of_wire(entry.wire_imm);
  }
  if (units > 0) transport_->sink().on_imm(imm, units);
  region_.reset();
  channel_->placed += operations_;
  if (operations_ > 0) {
    if (std::exchange(begun_bytes_, 0) > 0) channel_->begun_bytes = 0;
    const bool at_once = (entries_[0].length & ~kHasImm) >= kAckAtOnceBytes ||
                         channel_->placed - channel_->ack_sent >= kAckAtOnceOperations;
    transport_->ack_later(*channel_->link, at_once);
  }
  return true;
}

void InStream::check_region() {
  if (region_.is_revoked()) {
    connection()->placement().discard_range(region_->base, region_->length_bytes);
    region_.reset();
    region_closed_ = true;
  }
  for (RegionUse& region : views_) {
    TxBatch* const batch = connection()->pending_batch();
    if (region.is_revoked() && batch != nullptr) batch->detach(region->base, region->length_bytes);
  }
  std::erase_if(views_, [](const RegionUse& region) { return region.is_revoked(); });
  for (ReadJob& job : reads_) {
    if (job.region.is_revoked()) job.region.reset();
  }
}

// --- reads ---

bool InStream::on_read(const FrameHeader& header, std::span<const std::byte> meta) {
  if (meta.size() != sizeof(ReadMeta) || header.operations != 1) return reject("a malformed read");
  const auto read = read_meta<ReadMeta>(meta);
  if (reads_.size() >= kQueuedReadsMax) return reject("more reads at once than an engine asks for");
  RegionUse region = transport_->regions().use(read.region_id);
  const Status status = check_range(region, read.region_id, Access::kRemoteRead, read.offset, read.length);
  ++channel_->placed;
  if (status != Status::kDone) {
    append_frame(channel_->control, FrameType::kReadEnd, ReadEndMeta{read.read_id, static_cast<uint64_t>(status)},
                 why_refused(status, region, read.region_id, read.offset, read.length));
  } else {
    reads_.push_back({std::move(region), read.region_id, read.read_id, read.offset, read.length, 0});
  }
  transport_->ack_later(*channel_->link, true);
  return true;
}

// Returns the range where the kernel can read it: for GPU memory, a copy that the batch keeps. Null if no copy can be
// made.
const std::byte* InStream::readable(const TcpRegion& region, uint64_t offset, uint64_t length, TxBatch& batch) {
  if (region.gpu < 0) {
    const std::byte* const data = region.base + offset;
    return region.has_faulted && !is_readable(data, length) ? nullptr : data;
  }
  std::byte* const copy = batch.stage(length);
  return transport_->connections().copier.copy(region.gpu, copy, region.base + offset, length) ? copy : nullptr;
}

void InStream::fill_reads(TxBatch& batch) {
  const uint64_t others_bytes = batch.pending_bytes();
  while (!reads_.empty() && batch.pending_bytes() - others_bytes < kAnsweredBatchBytes) {
    ReadJob& job = reads_.front();
    if (!batch.has_room(2 * (sizeof(FrameHeader) + sizeof(ReadDataMeta)) + kTextBytesMax, 3)) return;
    const bool closed = !job.region || job.region.is_revoked();
    const std::byte* data = nullptr;
    const uint64_t length = std::min(job.length - job.done, kReadChunkBytes);
    if (!closed && length > 0) data = readable(*job.region.operator->(), job.offset + job.done, length, batch);
    const bool failed = !closed && length > 0 && data == nullptr;
    if (data != nullptr) {
      put_head(batch, FrameType::kReadData, 0, 0, ReadDataMeta{job.read_id, job.done}, length);
      batch.view(data, length);
      if (job.done == 0 || views_.empty()) views_.push_back(job.region.share());
      job.done += length;
      if (job.done < job.length) continue;
    }
    const Status status = closed   ? transport_->sink().status_of_gone(job.region_id)
                          : failed ? Status::kTransportFailed
                                   : Status::kDone;
    const std::string text =
        closed                ? why_refused(status, job.region, job.region_id, job.offset, job.length)
        : !failed             ? std::string()
        : job.region->gpu < 0 ? std::string("the target's ") + kUnreadableText
                              : "the target cannot copy it from its GPU: " + transport_->connections().copier.trouble();
    put_frame(batch, FrameType::kReadEnd, ReadEndMeta{job.read_id, static_cast<uint64_t>(status)}, text);
    reads_.pop_front();
  }
}

// --- messages ---

bool InStream::on_message(const FrameHeader& header, std::span<const std::byte> meta, Placement& place) {
  if (meta.size() != sizeof(MessageMeta) || header.operations != 1 || header.payload_bytes > kMessageBytesMax)
    return reject("a malformed message");
  InLink& link = *channel_->link;
  if (link.held.size() >= kHeldMax || link.held_bytes > 2 * transport_->message_window_bytes())
    return reject("more messages at once than an engine sends");
  if (link.taken.size() + link.untaken.size() > kOutcomesMax) return reject("it does not read what we answer");
  message_id_ = read_meta<MessageMeta>(meta).message_id;
  link.newest_id = std::max(link.newest_id, message_id_);
  message_.resize(header.payload_bytes);
  if (!message_.empty()) place.add(reinterpret_cast<std::byte*>(message_.data()), message_.size());
  return true;
}

bool InStream::finish_message() {
  InLink& link = *channel_->link;
  ++channel_->placed;
  Sink::Offer offer = Sink::Offer::kHold;
  if (!transport_->holds_messages()) offer = transport_->sink().on_message(link.peer, message_);
  switch (offer) {
    case Sink::Offer::kTaken:
      transport_->on_taken(link, message_id_);
      break;
    case Sink::Offer::kHold:
      link.held_bytes += message_.size();
      link.held.push_back({std::move(message_), message_id_});
      message_ = {};
      transport_->hold(link);
      break;
    case Sink::Offer::kTooLong:
      transport_->on_untaken(link, {message_id_, Status::kMessageTooLong, message_.size()});
      break;
  }
  transport_->ack_later(link, channel_->placed - channel_->ack_sent >= kAckAtOnceOperations);
  if (message_.capacity() > kAckAtOnceBytes) message_ = {};
  return true;
}

// --- broken connections ---

bool InStream::on_resolve(const ResolveMeta& resolve) {
  InLink& link = *channel_->link;
  const auto found = link.channels.find(resolve.channel);
  if (found == link.channels.end() || resolve.acked > found->second.placed)
    return reject("a question about an unknown channel");
  InChannel& asked = found->second;
  // Whatever is still in flight on the old connection must not be placed after we have answered.
  if (asked.is_open() && asked.epoch_min <= resolve.epoch) {
    if (asked.stream.get() == this) return reject("a question about the connection that it arrived on");
    asked.stream->break_off("the peer gave this connection up");
  }
  asked.epoch_min = std::max(asked.epoch_min, resolve.epoch + 1);
  // Operations after the last one placed are sent again, in any order.
  std::erase_if(asked.refusals, [&](const InChannel::Refusal& refusal) { return refusal.operation > asked.placed; });
  for (const InChannel::Refusal& refusal : asked.refusals) {
    if (refusal.operation <= resolve.acked) continue;
    append_frame(channel_->control, FrameType::kRefused,
                 RefusedMeta{refusal.operation, asked.index, static_cast<uint32_t>(refusal.status)}, refusal.text);
  }
  append_frame(channel_->control, FrameType::kResolved,
               ResolvedMeta{asked.placed, asked.begun_bytes, asked.index, asked.begun_epoch});
  transport_->tell_outcomes_again(link);
  transport_->ack_later(link, true);
  return true;
}

void InStream::on_turn_over() { transport_->ack_later(*channel_->link, true); }

void InStream::on_fault() {
  for (RegionUse& region : views_) region->has_faulted = true;
}

void InStream::on_broken() {
  region_.reset();
  reads_.clear();
  views_.clear();
  transport_->on_incoming_broken(*channel_, *this);
}

// --- out ---

void InStream::fill_outcomes(TxBatch& batch) {
  InLink& link = *channel_->link;
  put_taken(link, batch);
  size_t told = 0;
  for (; told < link.untaken.size() && batch.has_room(sizeof(FrameHeader) + sizeof(RefusedMeta) + kTextBytesMax);
       ++told) {
    const MessageOutcome& message = link.untaken[told];
    put_frame(batch, FrameType::kRefused, meta_of(message), text_of(message));
  }
  link.untaken.erase(link.untaken.begin(), link.untaken.begin() + static_cast<std::ptrdiff_t>(told));
}

void InStream::fill(TxBatch& batch) {
  InLink& link = *channel_->link;
  auto& control = channel_->control;
  put_frames(batch, control);
  if (!control.empty()) return;
  fill_outcomes(batch);
  if (channel_->placed > channel_->ack_sent && batch.has_room(sizeof(FrameHeader) + sizeof(AckMeta))) {
    put_head(batch, FrameType::kAck, 0, 0, AckMeta{link.id, channel_->placed, channel_->index, 0}, 0);
    channel_->ack_sent = channel_->placed;
  }
  fill_reads(batch);
}

}  // namespace crossrail::tcp
