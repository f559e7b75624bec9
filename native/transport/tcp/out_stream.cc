// The initiator's stream on a connection: operations out; acknowledgements, answers and read data in.
#include <algorithm>

#include "transport/refusal.h"
#include "transport/tcp/frames.h"
#include "transport/tcp/tcp_transport.h"
#include "util/readable.h"

namespace crossrail::tcp {

OutStream::OutStream(TcpTransport* transport, OutChannel* channel, std::shared_ptr<Connection> connection)
    : Stream(Role::kInitiator, std::move(connection)),
      transport_(transport),
      channel_(channel),
      epoch_(channel->epoch) {}

void OutStream::fill(TxBatch& batch) {
  channel_->fill(batch);
  if (!batch.empty() && channel_->lane() == Lane::kSmall)
    transport_->put_rider_acks(*channel_->link, *connection(), batch);
}

void OutStream::on_fault() { channel_->has_faulted = true; }

void OutStream::on_turn_over() { transport_->mark_dirty(*channel_->link); }

namespace {

// Operations up to `placed` are done. Neighbours of one transfer are retired together.
void on_acked(TcpTransport& transport, OutChannel& channel, uint64_t placed) {
  OutLink& link = *channel.link;
  channel.moved_ns = transport.now();
  if (channel.acked < placed) {
    link.vain_connections = 0;
    channel.carried_ns = channel.moved_ns;
    channel.was_vain = false;
  }
  while (channel.acked < placed) {
    const WorkRequest request = channel.sent.pop_front();
    const uint64_t operation = ++channel.acked;
    if (request.op == WorkOp::kService) {
      transport.retire(link, request, Status::kDone, {});
      continue;
    }
    if (request.op != WorkOp::kRead) channel.carried_bytes += request.length_bytes;
    if (request.op != WorkOp::kWrite) continue;  // messages end when taken, reads when their data has arrived
    const auto refused = channel.refusals.find(operation);
    if (refused != channel.refusals.end()) {
      channel.note_done(paced_bytes(request.length_bytes));
      transport.retire(link, request, refused->second.status, refused->second.text);
      continue;
    }
    uint32_t count = 1;
    uint64_t bytes = request.length_bytes;
    uint64_t paced = paced_bytes(bytes);
    while (channel.acked < placed && !channel.refusals.contains(channel.acked + 1) &&
           channel.sent.front().op == WorkOp::kWrite && channel.sent.front().context == request.context &&
           channel.sent.front().tag == request.tag) {
      const uint64_t length = channel.sent.pop_front().length_bytes;
      bytes += length;
      paced += paced_bytes(length);
      channel.carried_bytes += length;
      ++channel.acked;
      ++count;
    }
    channel.note_done(paced);
    channel.bytes_acked += bytes;
    link.end(count, transport.now());
    transport.sink().on_over(link, link.pairs[channel.pair()].rail, request.context, count, bytes);
    transport.sink().on_retired(link, request.context, request.tag, count, bytes, Status::kDone, {});
  }
  channel.refusals.erase(channel.refusals.begin(), channel.refusals.upper_bound(channel.acked));
  if (channel.bytes_acked - channel.bytes_acked_at_opening >= kFrameBytesMax) channel.frame_bytes = kFrameBytesMax;
}

// The peer has not given it to a buffer, and will not.
void end_recalled(TcpTransport& transport, OutLink& link, SentMessage& message) {
  message.over = true;
  link.messages_bytes -= message.request.length_bytes;
  link.end(1, transport.now());
  transport.sink().on_withdrawn(link, message.request.context, message.request.tag, message.request.length_bytes);
}

void end_message(TcpTransport& transport, OutLink& link, SentMessage& message, Status status, const std::string& text) {
  if (message.over) return;
  if (status == Status::kCancelled) return end_recalled(transport, link, message);
  message.over = true;
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

// If the operation is over or in doubt, no connection has any part of it left to send.
bool is_sent(const OutLink& link, const SentMessage& message) {
  const OutChannel& channel = *link.channels[message.channel];
  return message.over || channel.doubt || message.operation <= channel.acked || channel.is_sent(message.operation);
}

// Of the first write that was not placed completely, `begun_bytes` of what was sent are in place. False: impossible.
bool resume_write(OutChannel& channel, uint64_t begun_bytes) {
  WorkRequest* const begun = !channel.sent.empty() ? &channel.sent.front()
                             : channel.current     ? &*channel.current
                                                   : nullptr;
  if (begun == nullptr || begun->op != WorkOp::kWrite) return false;
  const uint64_t resumed = resumed_at(*begun);
  if (begun_bytes >= begun->length_bytes - resumed) return false;
  resume_at(*begun, resumed + begun_bytes);
  return true;
}

// Reads whose data was to come over the broken connection: data that has arrived is not requested again.
bool take_back_reads(OutChannel& channel, std::vector<WorkRequest>* again) {
  auto& reads = channel.link->reads;
  bool any_arrived = false;
  for (auto read = reads.begin(); read != reads.end();) {
    PendingRead& pending = read->second;
    if (pending.channel != channel.index) {
      ++read;
      continue;
    }
    const uint64_t resumed = resumed_at(pending.request);
    const uint64_t arrived =
        pending.failed ? 0 : std::min(pending.received_bytes, pending.request.length_bytes - resumed);
    resume_at(pending.request, resumed + arrived);
    any_arrived = any_arrived || resumed_at(pending.request) > resumed;
    again->push_back(pending.request);
    read = reads.erase(read);
  }
  return any_arrived;
}

// A connection that delivered none of this may break before a full frame gets through: the next frames are shorter.
void note_progress(OutChannel& channel, bool any) {
  constexpr uint64_t kFrameBytesMin = kResumeBytes;
  if (any) {
    channel.link->vain_connections = 0;
    channel.was_vain = false;
  } else if (channel.has_unplaced()) {
    channel.frame_bytes = std::max(channel.frame_bytes / 4, kFrameBytesMin);
  }
}

// The peer says how much of a broken channel's operations it has placed. The rest is sent again, over whatever is
// usable. False: the answer is impossible.
bool settle_doubts(TcpTransport& transport, OutChannel& channel, const ResolvedMeta& resolved) {
  OutLink& link = *channel.link;
  const OutChannel::Doubt doubt = *channel.doubt;
  const uint64_t placed = resolved.placed;
  const bool any_placed = placed > channel.acked;
  on_acked(transport, channel, placed);
  // If it is about an earlier connection, that one is settled.
  const bool any_begun = resolved.begun_bytes >= kResumeBytes && resolved.epoch == doubt.epoch;
  if (any_begun && !resume_write(channel, resolved.begun_bytes)) return false;
  std::vector<WorkRequest> again;
  const bool any_read = take_back_reads(channel, &again);
  note_progress(channel, any_placed || any_begun || any_read || !doubt.is_vain);
  channel.reads_open = 0;
  channel.reads_bytes = 0;
  channel.pace.drop();
  if (channel.current) again.push_back(*channel.current);
  channel.current.reset();
  for (size_t i = channel.sent.size(); i > 0; --i) {
    const WorkOp op = channel.sent[i - 1].op;
    if (op == WorkOp::kWrite || op == WorkOp::kService) again.push_back(channel.sent[i - 1]);
  }
  // Messages are sent again under new ids. The outcome of those that were placed is told anyway.
  for (size_t i = link.messages.size(); i > 0; --i) {
    SentMessage& message = link.messages[i - 1];
    if (message.over || message.channel != channel.index || message.operation <= placed) continue;
    if (message.is_recalled) {
      end_recalled(transport, link, message);
      continue;
    }
    message.over = true;
    link.messages_bytes -= message.request.length_bytes;
    again.push_back(message.request);
  }
  forget_ended_messages(link);
  channel.sent.clear();
  channel.refusals.clear();
  // It would break the next connection, too.
  const bool has_faulted = std::exchange(channel.has_faulted, false);
  uint32_t requeued = 0;
  for (const WorkRequest& request : again) {
    const bool is_write = request.op == WorkOp::kWrite && gpu_of(request) < 0;
    if (has_faulted && is_write && !is_readable(request.local, request.length_bytes)) {
      transport.retire(link, request, Status::kTransportFailed, std::string("the source's ") + kUnreadableText);
      continue;
    }
    link.requeue(request);
    ++requeued;
  }
  if (requeued > 0) transport.sink().on_sent_again(link, link.pairs[channel.pair()].rail, requeued);
  channel.doubt.reset();
  transport.mark_dirty(link);
  return true;
}

}  // namespace

void pair_twins(OutLink& out, InLink& in) {
  if (out.twin != nullptr) out.twin->twin = nullptr;
  if (in.twin != nullptr) in.twin->twin = nullptr;
  out.twin = &in;
  in.twin = &out;
}

bool take_ack(OutLink& link, const AckMeta& ack) {
  OutChannel* channel = ack.channel < link.channels.size() ? link.channels[ack.channel].get() : nullptr;
  if (channel == nullptr || ack.placed > channel->acked + channel->sent.size()) return false;
  // Refusals may have been lost with the connection that broke: the answer to our question repeats them, and says as
  // much as this. So do last words, and a peer that has sent its last words will not answer.
  if (channel->doubt && (ack.is_last == 0 || ack.placed < channel->acked)) return true;
  // If we believed this, its owner could change or free memory that the kernel has yet to read.
  if (!channel->is_sent(ack.placed)) return false;
  if (channel->doubt) return settle_doubts(*link.transport, *channel, {ack.placed, 0, ack.channel, 0});
  on_acked(*link.transport, *channel, ack.placed);
  if (link.queued > 0 || link.has_recalls) link.transport->mark_dirty(link);
  return true;
}

bool take_taken(OutLink& link, const TakenMeta& taken) {
  if (taken.count > kMessagesUnderWayMax) return false;
  for (uint64_t id = taken.first_id; id < taken.first_id + taken.count; ++id) {
    SentMessage* const message = find_message(link, id);
    if (message == nullptr) continue;
    if (!is_sent(link, *message)) return false;
    end_message(*link.transport, link, *message, Status::kDone, {});
  }
  forget_ended_messages(link);
  if (link.queued > 0) link.transport->mark_dirty(link);
  return true;
}

bool OutStream::on_head(const FrameHeader& header, std::span<const std::byte> meta, Placement& place) {
  OutLink& link = *channel_->link;
  const auto type = static_cast<FrameType>(header.type);
  read_id_ = 0;
  channel_->moved_ns = transport_->now();
  if (type != FrameType::kReadData && header.payload_bytes != 0) return reject_malformed(type);
  switch (type) {
    case FrameType::kAck: {
      if (meta.size() != sizeof(AckMeta)) return reject_malformed(type);
      const auto ack = read_meta<AckMeta>(meta);
      // An acknowledgement for a link that has ended meanwhile means nothing any more.
      OutLink* const out = ack.link_id == link.id ? &link : transport_->find_out(*link.address, ack.link_id);
      return out == nullptr || take_ack(*out, ack) || reject("an acknowledgement of what was never sent");
    }
    case FrameType::kTaken: {
      if (meta.size() != sizeof(TakenMeta)) return reject_malformed(type);
      const auto taken = read_meta<TakenMeta>(meta);
      OutLink* const out = taken.link_id == link.id ? &link : transport_->find_out(*link.address, taken.link_id);
      return out == nullptr || take_taken(*out, taken) || reject_malformed(type);
    }
    case FrameType::kRefused:
      return on_refused(meta);
    case FrameType::kResolved:
      if (meta.size() != sizeof(ResolvedMeta)) return reject_malformed(type);
      return on_resolved(read_meta<ResolvedMeta>(meta));
    case FrameType::kReadData:
      if (meta.size() != sizeof(ReadDataMeta)) return reject_malformed(type);
      return on_read_data(read_meta<ReadDataMeta>(meta), header.payload_bytes, place);
    case FrameType::kReadEnd:
      return on_read_end(meta);
    case FrameType::kPong:
      return meta.size() == sizeof(PingMeta) || reject_malformed(type);
    case FrameType::kClosing:
      if (!link.doom) link.doom.emplace(text_of(meta), LinkEnd::kLeft);
      transport_->watch(link);
      return true;
    case FrameType::kShare:
      return meta.size() == sizeof(ShareMeta) ? on_share(read_meta<ShareMeta>(meta)) : reject_malformed(type);
    case FrameType::kWrite:
    case FrameType::kRead:
    case FrameType::kMessage:
    case FrameType::kResolve:
    case FrameType::kPing:
    case FrameType::kBye:
    case FrameType::kShared:
    case FrameType::kService:
    case FrameType::kRecall:
      return reject("a frame that does not belong here");
  }
  return reject_malformed(type);
}

// A refused message ends here; a refused operation waits for the acknowledgement that covers it.
bool OutStream::on_refused(std::span<const std::byte> meta) {
  OutLink& link = *channel_->link;
  if (meta.size() < sizeof(RefusedMeta)) return reject_malformed(FrameType::kRefused);
  const auto refused = read_meta<RefusedMeta>(meta);
  const bool is_recalled =
      refused.channel == kMessageRefused && refused.status == static_cast<uint32_t>(Status::kCancelled);
  if (!is_refusal(refused.status) && !is_recalled) return reject_malformed(FrameType::kRefused);
  const auto status = static_cast<Status>(refused.status);
  const std::string text = text_of(meta.subspan(sizeof refused));
  if (refused.channel == kMessageRefused) {
    if (SentMessage* message = find_message(link, refused.operation)) {
      if (!is_sent(link, *message) || (is_recalled && !message->is_recalled))
        return reject_malformed(FrameType::kRefused);
      end_message(*transport_, link, *message, status, text);
    }
    forget_ended_messages(link);
    if (link.queued > 0) transport_->mark_dirty(link);
    return true;
  }
  OutChannel* channel = refused.channel < link.channels.size() ? link.channels[refused.channel].get() : nullptr;
  if (channel == nullptr || refused.operation > channel->acked + channel->sent.size() + 1) {
    return reject_malformed(FrameType::kRefused);
  }
  if (refused.operation > channel->acked && channel->refusals.size() <= kOperationsUnderWayMax) {
    channel->refusals.try_emplace(refused.operation, OutChannel::Refusal{status, text});
  }
  return true;
}

bool OutStream::on_resolved(const ResolvedMeta& resolved) {
  OutLink& link = *channel_->link;
  OutChannel* channel = resolved.channel < link.channels.size() ? link.channels[resolved.channel].get() : nullptr;
  if (channel == nullptr) return reject_malformed(FrameType::kResolved);
  if (!channel->doubt || channel->doubt->asked_through != channel_) return true;  // a duplicate answer
  if (resolved.placed < channel->acked || resolved.placed > channel->acked + channel->sent.size() ||
      !settle_doubts(*transport_, *channel, resolved)) {
    return reject("it claims to have placed operations that were never sent");
  }
  return true;
}

// --- reads ---

// A read's data comes over the connection that requested it: nothing else may end the read while its data is arriving.
static auto find_read(OutChannel& channel, uint64_t id) {
  auto& reads = channel.link->reads;
  const auto read = reads.find(id);
  return read == reads.end() || read->second.channel != channel.index || channel.doubt ? reads.end() : read;
}

bool OutStream::on_read_data(const ReadDataMeta& data, uint64_t payload_bytes, Placement& place) {
  const auto read = find_read(*channel_, data.read_id);
  if (read == channel_->link->reads.end()) return reject("data of a read that was never asked for");
  const WorkRequest& request = read->second.request;
  const uint64_t resumed = resumed_at(request);
  const uint64_t length = request.length_bytes - resumed;
  if (data.offset > length || payload_bytes > length - data.offset) return reject("more data than was asked for");
  place.aim_at(request.local_region);
  place.add(request.local + resumed + data.offset, payload_bytes);
  read_id_ = data.read_id;
  read_bytes_ = payload_bytes;
  return true;
}

bool OutStream::on_read_end(std::span<const std::byte> meta) {
  OutLink& link = *channel_->link;
  if (meta.size() < sizeof(ReadEndMeta)) return reject_malformed(FrameType::kReadEnd);
  const auto end = read_meta<ReadEndMeta>(meta);
  const auto read = find_read(*channel_, end.read_id);
  const bool is_done = end.status == static_cast<uint64_t>(Status::kDone);
  if (read == link.reads.end() || !(is_done || is_refusal(end.status))) return reject_malformed(FrameType::kReadEnd);
  const PendingRead pending = read->second;
  const bool is_lost = is_done && pending.failed;
  const auto status = is_lost ? Status::kTransportFailed : static_cast<Status>(end.status);
  const uint64_t asked_bytes = pending.request.length_bytes - resumed_at(pending.request);
  if (is_done && pending.received_bytes != asked_bytes) return reject_malformed(FrameType::kReadEnd);
  link.vain_connections = 0;
  link.reads.erase(read);
  --channel_->reads_open;
  channel_->reads_bytes -= pending.request.length_bytes;
  channel_->note_done(paced_bytes(pending.request.length_bytes));
  if (is_done) {
    channel_->bytes_read += pending.request.length_bytes;
    transport_->sink().on_over(link, link.pairs[channel_->pair()].rail, pending.request.context, 1,
                               pending.request.length_bytes);
  }
  transport_->retire(link, pending.request, status,
                     !is_lost ? text_of(meta.subspan(sizeof end))
                     : gpu_of(pending.request) < 0
                         ? std::string("our ") + kUnwritableText
                         : "what was read cannot be copied to our GPU: " + transport_->connections().copier.trouble());
  if (link.queued > 0) transport_->mark_dirty(link);
  return true;
}

bool OutStream::on_frame() {
  on_cut(0);
  return true;
}

void OutStream::on_cut(uint64_t missing_bytes) {
  if (read_id_ == 0) return;
  const auto read = channel_->link->reads.find(std::exchange(read_id_, 0));
  if (read == channel_->link->reads.end()) return;
  read->second.received_bytes += read_bytes_ - missing_bytes;
  channel_->carried_bytes += read_bytes_ - missing_bytes;
  channel_->carried_ns = transport_->now();
  channel_->was_vain = false;
  read->second.failed = read->second.failed || connection()->placement().failed;
}

}  // namespace crossrail::tcp
