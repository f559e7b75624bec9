// The target's side: executing what peers have put into their rings. Peers are not trusted: every field is copied out
// of shared memory once and checked before use.
#include <algorithm>
#include <cstring>

#include "transport/shm/shm_transport.h"
#include "transport/wire_imm.h"
#include "util/copy.h"

namespace crossrail::shm {

namespace {

constexpr uint32_t kEntriesPerPoll = 256;  // per rail, so that no peer starves the others
constexpr uint32_t kMessagesPerPoll = 64;

constexpr uint8_t code(Status status) { return status == Status::kDone ? 0 : static_cast<uint8_t>(status); }

}  // namespace

// Mostly there is nothing to do: that is found out here, inline.
uint32_t ShmTransport::poll_incoming(Incoming& link) {
  uint32_t moved = 0;
  if (link.messages.has_entry()) moved += drain_messages(link);
  if (link.services.has_entry()) moved += drain_services(link);
  link.answer_held = false;
  for (ChannelReader& reader : link.rails) {
    if (reader.has_entry()) moved += drain_rail(link, reader);
  }
  if (moved > 0) ring_later(*link.home, kForAnswers);
  return moved;
}

uint32_t ShmTransport::drain_messages(Incoming& link) {
  uint32_t taken = 0;
  link.message_held = false;
  while (taken < kMessagesPerPoll) {
    const Entry* entry = link.messages.peek();
    if (entry == nullptr) break;
    if (!link.messages.take()) {  // cancelled by the sender
      link.messages.pop(0);
      ++taken;
      continue;
    }
    const uint64_t bytes = copy_of_shared(entry->work.stage_bytes);
    const std::byte* block = link.messages.block(copy_of_shared(entry->work.stage_at), bytes);
    Status status = Status::kDone;
    if (entry->kind != EntryKind::kMessage || block == nullptr || bytes > kMessageBytesMax) {
      sink_->on_protocol_error(link.peer->name, "malformed message");
      status = Status::kTransportFailed;
    } else {
      switch (sink_->on_message(link.peer, {reinterpret_cast<const uint8_t*>(block), bytes})) {
        case Sink::Offer::kTaken:
          break;
        case Sink::Offer::kTooLong:
          status = Status::kMessageTooLong;
          break;
        case Sink::Offer::kHold:
          link.message_held = true;
          break;
      }
      if (link.message_held) {
        link.messages.put_back();
        break;
      }
    }
    link.messages.pop(code(status));
    ++taken;
  }
  link.messages.publish();
  return taken;
}

uint32_t ShmTransport::drain_services(Incoming& link) {
  uint32_t taken = 0;
  for (; taken < kMessagesPerPoll; ++taken) {
    const Entry* entry = link.services.peek();
    if (entry == nullptr) break;
    const uint64_t bytes = copy_of_shared(entry->work.stage_bytes);
    const std::byte* block = link.services.block(copy_of_shared(entry->work.stage_at), bytes);
    Status status = Status::kDone;
    if (entry->kind != EntryKind::kService || block == nullptr || bytes > kServiceBytesMax) {
      sink_->on_protocol_error(link.peer->name, "malformed service message");
      status = Status::kTransportFailed;
    } else {
      const auto* begin = reinterpret_cast<const uint8_t*>(block);
      const std::vector<uint8_t> payload(begin, begin + bytes);  // the peer may change its memory while we look
      sink_->on_service(link.peer, payload);
    }
    link.services.pop(code(status));
  }
  link.services.publish();
  return taken;
}

uint32_t ShmTransport::drain_rail(Incoming& link, ChannelReader& reader) {
  uint32_t taken = 0;
  while (taken < kEntriesPerPoll) {
    const Entry* entry = reader.peek();
    if (entry == nullptr) break;
    Status status = Status::kDone;
    const EntryKind kind = entry->kind;
    // acquire: pairs with the store in flush_link; seeing it means that the initiator has reported these as not done.
    const bool revoked = kind != EntryKind::kImms && link.segment->revoked.load(std::memory_order_acquire) != 0;
    if (kind == EntryKind::kStagedWrite && !reader.take()) {
      // cancelled by the initiator
    } else if (revoked) {
      status = Status::kCancelled;
    } else if (kind == EntryKind::kImms) {
      const uint32_t count = std::min<uint32_t>(entry->count, kImmPairsMax);
      for (uint32_t i = 0; i < count; ++i) sink_->on_imm(entry->imms[i].imm & kImmMax, entry->imms[i].units);
    } else if (kind == EntryKind::kStagedWrite) {
      status = execute_write(link, reader, *entry);
    } else if (kind == EntryKind::kReadRequest) {
      if (!answer_read(link, *entry)) {  // no room for the answer: later
        link.answer_held = true;
        link.answers_taken = link.responses.writer.consumed();
        break;
      }
    } else {
      sink_->on_protocol_error(link.peer->name, "entry of unknown kind");
      status = Status::kTransportFailed;
    }
    reader.pop(code(status));
    ++taken;
  }
  reader.publish();
  return taken;
}

Status ShmTransport::execute_write(Incoming& link, const ChannelReader& reader, const Entry& entry) {
  const auto work = copy_of_shared(entry.work);
  const uint64_t table_bytes = uint64_t{work.pieces} * sizeof(StagedPiece);
  const std::byte* block = reader.block(work.stage_at, work.stage_bytes);
  if (block == nullptr || work.pieces == 0 || work.pieces > kStagedPiecesMax || table_bytes > work.stage_bytes ||
      work.stage_at % kLine != 0) {
    return Status::kTransportFailed;
  }
  Status status = Status::kDone;
  // Same protocol as touch(): announce, then check. Our own close() waits while we execute.
  regions_.executing.store(work.region_id, std::memory_order_seq_cst);
  const RegionTable::Target* target = regions_.find(work.region_id);
  if (target == nullptr) {
    status = sink_->status_of_gone(work.region_id);
  } else if (!allows(target->access, Access::kRemoteWrite)) {
    status = Status::kAccessDenied;
  } else {
    status = place(link, *target, block, work.stage_bytes, work.pieces, work.is_bulk != 0);
  }
  regions_.executing.store(0, std::memory_order_release);  // our copies are finished before close() sees this
  if (status == Status::kDone && work.units > 0) sink_->on_imm(work.imm & kImmMax, work.units);
  return status;
}

// Puts a block's bytes where its table says.
Status ShmTransport::place(Incoming& link, const RegionTable::Target& target, const std::byte* block,
                           uint64_t block_bytes, uint32_t pieces, bool bulk) {
  Status status = Status::kDone;
  uint64_t data_at = uint64_t{pieces} * sizeof(StagedPiece);
  if (target.gpu >= 0) pin(link, target.gpu);
  for (uint32_t i = 0; i < pieces; ++i) {
    StagedPiece piece;
    std::memcpy(&piece, block + i * sizeof piece, sizeof piece);
    std::atomic_signal_fence(std::memory_order_seq_cst);  // as in copy_of_shared()
    if (piece.length_bytes > block_bytes - data_at || !fits(piece.offset, piece.length_bytes, target.length_bytes)) {
      status = Status::kOutOfBounds;
      break;
    }
    if (target.gpu >= 0) {
      copier_.begin(target.gpu, target.base + piece.offset, block + data_at, piece.length_bytes);
    } else if (bulk) {
      copy_streaming(target.base + piece.offset, block + data_at, piece.length_bytes, nullptr, 0);
    } else {
      copy_cached(target.base + piece.offset, block + data_at, piece.length_bytes);
    }
    data_at += piece.length_bytes;
  }
  if (bulk) copy_fence();
  if (target.gpu >= 0 && !copier_.finish() && status == Status::kDone) {
    sink_->on_protocol_error(link.peer->name, "what it wrote could not be copied to our GPU: " + copier_.trouble());
    status = Status::kTransportFailed;
  }
  return status;
}

// False: the response channel is full.
bool ShmTransport::answer_read(Incoming& link, const Entry& entry) {
  const auto work = copy_of_shared(entry.work);
  ChannelWriter& writer = link.responses.writer;
  if (!writer.has_room()) return false;
  writer.refresh();
  RailQueue& queue = link.responses;
  uint64_t stage_at = 0;
  Status status = Status::kDone;
  const uint64_t bytes = work.stage_bytes;
  std::byte* block = nullptr;
  if (bytes > kReadChunkBytes) {
    status = Status::kTransportFailed;
  } else {
    inflight_slot(queue);  // allocates the table of staging positions
    for (; queue.retired < writer.consumed(); ++queue.retired) {
      writer.release_stage(queue.inflight[queue.retired % kRingEntries].stage_head);
    }
    block = writer.reserve((bytes + kLine - 1) / kLine * kLine, &stage_at);
    if (block == nullptr) return false;
    regions_.executing.store(work.region_id, std::memory_order_seq_cst);
    const RegionTable::Target* target = regions_.find(work.region_id);
    if (target == nullptr) {
      status = sink_->status_of_gone(work.region_id);
    } else if (!allows(target->access, Access::kRemoteRead)) {
      status = Status::kAccessDenied;
    } else if (!fits(work.offset, bytes, target->length_bytes)) {
      status = Status::kOutOfBounds;
    } else if (target->gpu >= 0) {
      pin(link, target->gpu);
      if (!copier_.copy(target->gpu, block, target->base + work.offset, bytes)) status = Status::kTransportFailed;
    } else {
      copy_cached(block, target->base + work.offset, bytes);
    }
    regions_.executing.store(0, std::memory_order_release);
  }
  inflight_slot(queue).stage_head = writer.stage_head();
  Entry& response = writer.next();
  response.kind = EntryKind::kReadResponse;
  response.outcome = code(status);
  response.work = {.region_id = 0,
                   .offset = 0,
                   .stage_at = stage_at,
                   .stage_bytes = work.stage_bytes,
                   .pieces = 0,
                   .imm = 0,
                   .units = 0,
                   .tag = work.tag,
                   .is_bulk = 0};
  writer.publish(response);
  return true;
}

void ShmTransport::add_incoming(ControlEvent event) {
  auto link = std::make_unique<Incoming>();
  link->id = event.link_id;
  link->peer = std::move(event.peer);
  link->rail_count = event.rail_count;
  link->segment_map = std::move(event.segment);
  link->segment = reinterpret_cast<LinkSegment*>(link->segment_map->data());
  link->home = std::move(event.home);
  link->messages = ChannelReader(&link->segment->channels[kMessageChannel]);
  link->responses.writer = ChannelWriter(&link->segment->channels[kResponseChannel]);
  link->services = ChannelReader(&link->segment->channels[kServiceChannel]);
  for (uint32_t rail = 0; rail < link->rail_count; ++rail) {
    link->rails.emplace_back(&link->segment->channels[kFirstRailChannel + rail]);
  }
  incoming_.push_back(std::move(link));
}

// Takes what is still valid in the rings. A ring holds at most kRingEntries entries; more would mean that the peer is
// still writing.
void ShmTransport::drain(Incoming& link) {
  for (uint32_t round = 0; round <= kRingEntries / kMessagesPerPoll && drain_messages(link) > 0; ++round) {
  }
  for (uint32_t round = 0; round <= kRingEntries / kMessagesPerPoll && drain_services(link) > 0; ++round) {
  }
  for (ChannelReader& reader : link.rails) {
    for (uint32_t round = 0; round <= kRingEntries / kEntriesPerPoll && drain_rail(link, reader) > 0; ++round) {
    }
  }
}

// What was done for a peer before it left is counted before anybody hears that it did.
void ShmTransport::take_last_words(const Address& peer) {
  for (const auto& link : incoming_) {
    if (link->peer->incarnation == peer.incarnation) drain(*link);
  }
}

// Forgets a peer that left.
void ShmTransport::drop_incoming(uint64_t link_id) {
  const auto found =
      std::find_if(incoming_.begin(), incoming_.end(), [&](const auto& link) { return link->id == link_id; });
  if (found == incoming_.end()) return;
  drain(**found);
  ring_all();  // its home is in the list
  incoming_.erase(found);
  control_->drop_toucher(link_id);
}

}  // namespace crossrail::shm
