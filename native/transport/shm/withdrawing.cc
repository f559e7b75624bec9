// The initiator takes back what the target has not begun: on cancel, and when a link ends.
#include <utility>

#include "transport/shm/shm_transport.h"

namespace crossrail::shm {

void ShmTransport::withdraw(bool (*wanted)(void* context)) {
  for (const auto& link : outgoing_) {
    if (link->outstanding == 0 || !link->up) continue;
    withdraw_queue(*link, link->messages, wanted);
    for (RailQueue& rail : link->rails) withdraw_queue(*link, rail, wanted);
    withdraw_reads(*link, wanted);
  }
}

void ShmTransport::report_withdrawn(Outgoing& link, void* context, uint32_t tag, uint32_t count, uint64_t bytes) {
  for (uint32_t i = 0; i < count; ++i) sink_->on_withdrawn(link, context, tag, i == 0 ? bytes : 0);
}

// The chunks of a request are in the ring in order, and the target takes them in order: the last one carries the
// immediate and must be withdrawn first, so that a target that is faster than us does not count what it did not get.
void ShmTransport::withdraw_queue(Outgoing& link, RailQueue& rail, bool (*wanted)(void* context)) {
  withdraw_pending(link, rail, wanted);
  InFlight ending{};  // the last chunk that was withdrawn, until its earlier chunks are out of the target's hands
  const auto settle = [&] {
    if (ending.retires == 0) return;
    link.outstanding -= ending.retires;
    report_withdrawn(link, ending.context, ending.tag, std::exchange(ending.retires, 0), ending.bytes);
  };
  for (uint64_t end = rail.writer.position(); end > rail.retired && rail.staged_inflight > 0; --end) {
    InFlight& slot = rail.inflight[(end - 1) % kRingEntries];
    if (!slot.staged || slot.context == nullptr) continue;
    const bool is_earlier_chunk = ending.retires > 0 && slot.retires == 0;
    if (!is_earlier_chunk) settle();
    if (!is_earlier_chunk && (slot.retires == 0 || !wanted(slot.context))) continue;
    if (rail.writer.withdraw(end - 1)) {
      if (!is_earlier_chunk) ending = slot;
      slot.context = nullptr;  // the slot stays: its staging is freed in order
      slot.retires = 0;
      ++link.withdrawn;
    } else if (is_earlier_chunk) {  // the target is working on it: the request ends when this chunk does
      slot.bytes = ending.bytes;
      slot.retires = std::exchange(ending.retires, 0);
      slot.cut = true;
    } else if (&rail == &link.messages) {
      slot.wanted_back = link.messages_wanted = true;
    }
  }
  // The rest began before everything in flight: its earlier chunks are confirmed, and their status is the rest's
  // status.
  if (ending.retires > 0) rail.sticky = Status::kDone;
  settle();
}

// A target without a free buffer takes the message at its head and puts it back, over and over. If we tried to take it
// back just then, we try again until it is ours, or delivered.
uint32_t ShmTransport::retry_messages(Outgoing& link) {
  RailQueue& queue = link.messages;
  link.messages_wanted = false;
  uint32_t withdrawn = 0;
  for (uint64_t position = queue.retired; position < queue.writer.position(); ++position) {
    InFlight& slot = queue.inflight[position % kRingEntries];
    if (!slot.staged || slot.context == nullptr || !slot.wanted_back) continue;
    if (!queue.writer.withdraw(position)) {
      link.messages_wanted = true;
      continue;
    }
    --link.outstanding;
    ++link.withdrawn;
    ++withdrawn;
    report_withdrawn(link, std::exchange(slot.context, nullptr), slot.tag, std::exchange(slot.retires, 0), slot.bytes);
  }
  return withdrawn;
}

// Work that has not (completely) reached the ring. A request whose first chunks are already there ends with the last of
// these.
void ShmTransport::withdraw_pending(Outgoing& link, RailQueue& rail, bool (*wanted)(void* context)) {
  std::deque<RailQueue::Pending> kept;
  std::deque<RailQueue::Pending> cut;
  for (const RailQueue::Pending& pending : rail.pending)
    (wanted(pending.request.context) ? cut : kept).push_back(pending);
  rail.pending.swap(kept);
  for (const RailQueue::Pending& pending : cut) {
    if (pending.read != nullptr && pending.read->chunks_open > 0) {
      pending.read->all_requested = true;  // withdraw_reads ends it
      continue;
    }
    const bool is_read = pending.read != nullptr;
    if (is_read) {
      --link.reads_open;
      delete pending.read;
    }
    const WorkRequest& request = pending.request;
    if (!is_read && pending.done_bytes > 0) {
      if (end_with_last_chunk(rail, request)) continue;
      rail.sticky = Status::kDone;  // it belonged to this request
    }
    --link.outstanding;
    report_withdrawn(link, request.context, request.tag, 1, request.length_bytes);
  }
}

// False: the target has confirmed all chunks already.
bool ShmTransport::end_with_last_chunk(RailQueue& rail, const WorkRequest& request) {
  for (uint64_t end = rail.writer.position(); end > rail.retired; --end) {
    InFlight& slot = rail.inflight[(end - 1) % kRingEntries];
    if (!slot.staged) continue;
    if (slot.context != request.context || slot.retires != 0) return false;
    slot.bytes = request.length_bytes;
    slot.retires = 1;
    slot.cut = true;
    return true;
  }
  return false;
}

// Answers to requests already made are ignored by their tags.
void ShmTransport::withdraw_reads(Outgoing& link, bool (*wanted)(void* context)) {
  for (ReadChunk& chunk : link.read_chunks) {
    if (chunk.read == nullptr || !chunk.read->all_requested || !wanted(chunk.read->context)) continue;
    StagedRead& read = *std::exchange(chunk.read, nullptr);
    if (--read.chunks_open > 0) continue;
    --link.outstanding;
    --link.reads_open;
    report_withdrawn(link, read.context, read.tag, 1, read.bytes);
    delete &read;
  }
}

// Ends everything on the link: confirmed entries with the status confirmed, the rest with `status`. The target executes
// none of the rest once it has seen `revoked`.
void ShmTransport::flush_link(Outgoing& link, Status status, const std::string& detail) {
  link.is_given_up = true;
  link.segment->revoked.store(1, std::memory_order_seq_cst);
  if (hazardous_ == &link) clear_hazards();
  const auto flush_queue = [&](RailQueue& rail) {
    rail.was_full = false;
    if (link.up) retire_staged(link, rail);
    for (uint64_t position = rail.retired; position < rail.writer.position() && rail.staged_inflight > 0; ++position) {
      InFlight& slot = rail.inflight[position % kRingEntries];
      if (!slot.staged) continue;
      slot.staged = false;
      --rail.staged_inflight;
      if (slot.retires > 0) {
        if (slot.cut) {
          report_withdrawn(link, slot.context, slot.tag, slot.retires, slot.bytes);
        } else {
          sink_->on_retired(link, slot.context, slot.tag, slot.retires, 0, status, detail);
        }
      }
    }
    while (!rail.pending.empty()) {
      const RailQueue::Pending pending = rail.pending.front();
      rail.pending.pop_front();
      if (pending.read == nullptr) {
        sink_->on_retired(link, pending.request.context, pending.request.tag, 1, 0, status, detail);
      } else {
        pending.read->all_requested = true;  // ends below, with its chunks
        if (pending.read->chunks_open == 0) {
          sink_->on_retired(link, pending.read->context, pending.read->tag, 1, 0, status, detail);
          delete pending.read;
        }
      }
    }
  };
  if (link.up) take_responses(link);
  flush_queue(link.messages);
  flush_queue(link.services);
  for (RailQueue& rail : link.rails) flush_queue(rail);
  for (ReadChunk& chunk : link.read_chunks) {
    if (chunk.read == nullptr) continue;
    StagedRead& read = *std::exchange(chunk.read, nullptr);
    if (--read.chunks_open > 0) continue;
    sink_->on_retired(link, read.context, read.tag, 1, 0, status, detail);
    delete &read;
  }
  for (auto& [region_id, import] : link.imports) {
    import->state = Import::State::kRefused;
    import->status = status;
    import->text = detail;
    import->map.reset();
    import->reached.clear();
    import->shared = {};
  }
  link.reads_open = 0;
  link.responses_due = 0;
  link.outstanding = 0;
  link.full_queues = 0;
  link.withdrawn = 0;
  link.imports_pending = 0;
  link.up = false;
}

}  // namespace crossrail::shm
