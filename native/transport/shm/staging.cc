// The initiator's side of private memory: pieces and reads pass through the rings in chunks, and what comes back.
#include <algorithm>
#include <deque>
#include <new>
#include <utility>

#include "transport/refusal.h"
#include "transport/shm/shm_transport.h"
#include "transport/wire_imm.h"
#include "util/clock.h"
#include "util/copy.h"

namespace crossrail::shm {

namespace {

constexpr uint32_t kChunksPerPoll = 4;

// Decodes a status byte from shared memory.
Status status_from_peer(uint8_t byte) {
  if (byte == 0 || byte == kEntryTaken) return Status::kDone;
  return is_refusal(byte) ? static_cast<Status>(byte) : Status::kTransportFailed;
}

void begin_timing(Outgoing& link) {
  if (link.staging_ns == 0) link.staging_ns = now_ns();
}

void count_timed(Outgoing& link, Timed timed, uint64_t bytes) {
  if (timed != Timed::kNot) link.staged_bytes[timed == Timed::kBulk] += bytes;
}

// What one entry stages from the head of a queue: a part of a long piece, or many short pieces of one transfer for one
// region.
struct WriteChunk {
  uint64_t data_bytes;
  uint32_t pieces = 1;          // at the head of the queue
  uint32_t finished = 0;        // number of these completed: all, or none if the rest of a long one is still to come
  uint64_t finished_bytes = 0;  // likewise, including what was staged of it before
  uint32_t units = 0;           // that the completed ones add to the immediate

  uint64_t table_bytes() const { return pieces * sizeof(StagedPiece); }
};

// Whether it may share a chunk with the first.
bool goes_with(const WorkRequest& next, const WorkRequest& first) {
  return next.op == WorkOp::kWrite && next.context == first.context && next.tag == first.tag &&
         next.remote == first.remote && next.has_imm == first.has_imm &&
         (!next.has_imm || imm_of_wire(next.wire_imm) == imm_of_wire(first.wire_imm));  // targets of a scatter
}

uint32_t units_of(const WorkRequest& request) { return request.has_imm ? units_of_wire(request.wire_imm) : 0; }

WriteChunk cut_chunk(const std::deque<RailQueue::Pending>& pending, uint64_t chunk_bytes) {
  const WorkRequest& first = pending.front().request;
  const uint64_t left_bytes = first.length_bytes - pending.front().done_bytes;
  WriteChunk chunk{.data_bytes = std::min(left_bytes, chunk_bytes)};
  if (chunk.data_bytes < left_bytes) return chunk;
  chunk.finished = 1;
  chunk.finished_bytes = first.length_bytes;
  chunk.units = units_of(first);
  while (chunk.pieces < kStagedPiecesMax && chunk.pieces < pending.size()) {
    const WorkRequest& next = pending[chunk.pieces].request;
    if (!goes_with(next, first) || chunk.data_bytes + next.length_bytes > chunk_bytes) break;
    chunk.data_bytes += next.length_bytes;
    chunk.finished_bytes += next.length_bytes;
    chunk.units += units_of(next);
    ++chunk.pieces;
    ++chunk.finished;
  }
  return chunk;
}

// Copies the chunk into its block: a table of its pieces, and their bytes. False: our GPU did not deliver them.
bool stage_chunk(const std::deque<RailQueue::Pending>& pending, const WriteChunk& chunk, device::Copier& copier,
                 std::byte* block) {
  const int gpu = gpu_of(pending.front().request);  // the same for all pieces: they are of one transfer
  auto* table = reinterpret_cast<StagedPiece*>(block);
  std::byte* data = block + chunk.table_bytes();
  for (uint32_t i = 0; i < chunk.pieces; ++i) {
    const WorkRequest& request = pending[i].request;
    const uint64_t from = pending[i].done_bytes;
    // The head may have been staged in part before; those after it go completely.
    const uint64_t bytes = chunk.pieces == 1 ? chunk.data_bytes : request.length_bytes - from;
    table[i] = {request.remote_offset + from, static_cast<uint32_t>(bytes), 0};
    if (gpu >= 0) {
      copier.begin(gpu, data, request.local + from, bytes);
    } else {
      copy_cached(data, request.local + from, bytes);
    }
    data += bytes;
  }
  return gpu < 0 || copier.finish();
}

}  // namespace

// The slot for the entry that is published next. The array is allocated with the rail's first staged entry.
InFlight& ShmTransport::inflight_slot(RailQueue& rail) {
  if (!rail.inflight) {
    rail.inflight.reset(static_cast<InFlight*>(std::calloc(kRingEntries, sizeof(InFlight))));
    if (!rail.inflight) throw std::bad_alloc();
    rail.retired = rail.writer.position();
  }
  return rail.inflight[rail.writer.position() % kRingEntries];
}

uint32_t ShmTransport::push_pending(Outgoing& link, RailQueue& rail) {
  uint32_t pushed = 0;
  while (pushed < kChunksPerPoll && !rail.pending.empty()) {
    const RailQueue::Pending& head = rail.pending.front();
    const bool is_write = head.request.op == WorkOp::kWrite;
    if (!(goes_by_gpu(head) ? push_gpu_copies(link, rail)
          : is_write        ? push_write_chunk(link, rail)
                            : push_read_chunks(link, rail))) {
      break;
    }
    ++pushed;
  }
  return pushed;
}

// Whether chunks of the request at the head are in flight, which is not (completely) in the ring yet.
bool ShmTransport::is_begun(const RailQueue& rail) {
  for (uint64_t at = rail.retired; rail.staged_inflight > 0 && at < rail.writer.position(); ++at) {
    const InFlight& slot = rail.inflight[at % kRingEntries];
    if (slot.staged && slot.context != nullptr && slot.retires == 0) return true;
  }
  return false;
}

bool ShmTransport::push_write_chunk(Outgoing& link, RailQueue& rail) {
  if (!has_room(link, rail)) return false;
  const WorkRequest& first = rail.pending.front().request;
  Import& import = *static_cast<ShmKey*>(first.remote)->import;
  const int gpu = gpu_of(first);
  const bool is_gpu = gpu >= 0 || import.is_gpu;
  WriteChunk chunk = cut_chunk(rail.pending, is_gpu ? kGpuChunkBytes : kStageChunkBytes);
  // A driver may refuse one copy and carry out the next: the chunk that counts waits until those before it are there.
  if (import.is_gpu && chunk.units > 0 && rail.pending.front().done_bytes > 0 && is_begun(rail)) return false;
  uint64_t stage_at = 0;
  // Blocks begin on a cache line, so that tables are aligned and neighbours do not share lines.
  const uint64_t block_bytes = (chunk.table_bytes() + chunk.data_bytes + kLine - 1) / kLine * kLine;
  std::byte* block = rail.writer.reserve(block_bytes, &stage_at);
  if (block == nullptr) return false;
  if (timed_as(is_gpu, chunk.data_bytes, first.bulk) != Timed::kNot) begin_timing(link);
  if (gpu >= 0) pin(link, gpu);
  const bool failed = !stage_chunk(rail.pending, chunk, copier_, block);
  if (failed) chunk.finished = std::max(chunk.finished, 1u);  // nothing more is tried of a long piece
  import.bytes_moved += chunk.data_bytes;
  inflight_slot(rail) = {.context = first.context,
                         .bytes = chunk.finished_bytes,
                         .stage_head = rail.writer.stage_head(),
                         .tag = first.tag,
                         .retires = chunk.finished,
                         .staged = true,
                         .cut = false,
                         .timed = timed_as(is_gpu, chunk.finished_bytes, first.bulk),
                         .failed = failed,
                         .wanted_back = false};
  ++rail.staged_inflight;
  Entry& entry = rail.writer.next();
  entry.kind = EntryKind::kStagedWrite;
  if (failed) entry.status.store(kEntryWithdrawn, std::memory_order_relaxed);  // published with the entry
  entry.work = {.region_id = import.region_id,
                .offset = 0,
                .stage_at = stage_at,
                .stage_bytes = static_cast<uint32_t>(chunk.table_bytes() + chunk.data_bytes),
                .pieces = chunk.pieces,
                .imm = imm_of_wire(first.wire_imm),
                .units = chunk.units,
                .tag = 0,
                .is_bulk = first.bulk ? 1u : 0u};
  rail.writer.publish(entry);
  if (chunk.finished == 0) {
    rail.pending.front().done_bytes += chunk.data_bytes;
  } else {
    rail.pending.erase(rail.pending.begin(), rail.pending.begin() + chunk.finished);
  }
  return true;
}

// Requests as much of the read at the head as there are free chunks.
bool ShmTransport::push_read_chunks(Outgoing& link, RailQueue& rail) {
  RailQueue::Pending& head = rail.pending.front();
  const WorkRequest& request = head.request;
  Import& import = *static_cast<ShmKey*>(request.remote)->import;
  bool pushed = false;
  while (head.done_bytes < request.length_bytes && has_room(link, rail)) {
    const auto chunk = std::find_if(link.read_chunks.begin(), link.read_chunks.end(),
                                    [](const ReadChunk& slot) { return slot.read == nullptr; });
    if (chunk == link.read_chunks.end()) break;
    if (head.read == nullptr) {
      const Timed timed = timed_as(import.is_gpu || gpu_of(request) >= 0, request.length_bytes, request.bulk);
      if (timed != Timed::kNot) begin_timing(link);
      head.read = new StagedRead{request.context, request.tag, request.length_bytes, 0, false, Status::kDone, timed};
      ++link.reads_open;
    }
    const uint64_t bytes = std::min(request.length_bytes - head.done_bytes, kReadChunkBytes);
    const auto slot = static_cast<uint32_t>(chunk - link.read_chunks.begin());
    const uint32_t tag = (chunk->tag / kReadChunks + 1) * kReadChunks + slot;  // never the same as before
    *chunk = {head.read, request.local + head.done_bytes, gpu_of(request), static_cast<uint32_t>(bytes), tag};
    ++link.responses_due;
    ++head.read->chunks_open;
    if (rail.inflight) inflight_slot(rail).staged = false;
    Entry& entry = rail.writer.next();
    entry.kind = EntryKind::kReadRequest;
    entry.work = {.region_id = import.region_id,
                  .offset = request.remote_offset + head.done_bytes,
                  .stage_at = 0,
                  .stage_bytes = static_cast<uint32_t>(bytes),
                  .pieces = 0,
                  .imm = 0,
                  .units = 0,
                  .tag = tag,
                  .is_bulk = 0};
    rail.writer.publish(entry);
    head.done_bytes += bytes;
    import.bytes_moved += bytes;
    pushed = true;
  }
  if (head.done_bytes == request.length_bytes) {
    head.read->all_requested = true;
    rail.pending.pop_front();
  }
  return pushed;
}

// A chunk of the request at the head has failed: the rest of it counts nothing.
void ShmTransport::uncount_head(RailQueue& rail, const void* context) {
  if (rail.pending.empty()) return;
  RailQueue::Pending& head = rail.pending.front();
  if (head.done_bytes > 0 && head.request.context == context) head.request.has_imm = false;
}

uint32_t ShmTransport::retire_staged(Outgoing& link, RailQueue& rail) {
  if (rail.staged_inflight == 0) {
    rail.retired = std::max(rail.retired, rail.writer.consumed());
    return 0;
  }
  rail.writer.refresh();
  uint32_t retired = 0;
  for (; rail.retired < rail.writer.consumed(); ++rail.retired) {
    InFlight& slot = rail.inflight[rail.retired % kRingEntries];
    if (!slot.staged) continue;
    const uint8_t status = rail.writer.status_of(rail.retired);
    // It saw that we give the link up, and has left this undone.
    if (link.is_given_up && slot.context != nullptr && status == static_cast<uint8_t>(Status::kCancelled)) break;
    slot.staged = false;
    --rail.staged_inflight;
    rail.writer.release_stage(slot.stage_head);
    ++retired;
    if (slot.context == nullptr) {  // withdrawn
      --link.withdrawn;
      continue;
    }
    if (rail.sticky == Status::kDone) {
      rail.sticky = slot.failed ? Status::kTransportFailed : status_from_peer(status);
      if (rail.sticky != Status::kDone && slot.retires == 0) uncount_head(rail, slot.context);
    }
    if (slot.retires == 0) continue;
    const Status outcome = std::exchange(rail.sticky, Status::kDone);
    link.outstanding -= slot.retires;
    if (slot.cut && outcome == Status::kDone) {
      report_withdrawn(link, slot.context, slot.tag, slot.retires, slot.bytes);
      continue;
    }
    if (outcome == Status::kDone) count_timed(link, slot.timed, slot.bytes);
    sink_->on_retired(link, slot.context, slot.tag, slot.retires, slot.bytes, outcome,
                      outcome == Status::kDone ? ""
                      : slot.failed            ? "the source could not be copied: " + copier_.trouble()
                                               : "refused by the target");
  }
  return retired;
}

// No more than were requested: a target that keeps answering does not keep us from others.
uint32_t ShmTransport::take_responses(Outgoing& link) {
  uint32_t taken = 0;
  for (; link.responses_due > 0; --link.responses_due) {
    const Entry* const entry = link.responses.peek();
    if (entry == nullptr) break;
    const auto work = copy_of_shared(entry->work);
    const uint8_t status = copy_of_shared(entry->outcome);
    ReadChunk& chunk = link.read_chunks[work.tag % kReadChunks];
    if (entry->kind == EntryKind::kReadResponse && chunk.tag == work.tag && chunk.read != nullptr) {
      StagedRead& read = *std::exchange(chunk.read, nullptr);
      const std::byte* block = link.responses.block(work.stage_at, work.stage_bytes);
      if (status != 0) {
        read.status = status_from_peer(status);
      } else if (block == nullptr || work.stage_bytes != chunk.bytes) {
        read.status = Status::kTransportFailed;
      } else if (chunk.gpu >= 0) {
        pin(link, chunk.gpu);
        if (!copier_.copy(chunk.gpu, chunk.local, block, work.stage_bytes)) read.status = Status::kTransportFailed;
      } else {
        copy_cached(chunk.local, block, work.stage_bytes);
      }
      if (--read.chunks_open == 0 && read.all_requested) {
        --link.outstanding;
        --link.reads_open;
        if (read.status == Status::kDone) count_timed(link, read.timed, read.bytes);
        sink_->on_retired(link, read.context, read.tag, 1, read.status == Status::kDone ? read.bytes : 0, read.status,
                          read.status == Status::kDone ? "" : "refused by the target, or not to be copied");
        delete &read;
      }
    }  // else: for a cancelled read
    link.responses.pop(0);
    ++taken;
  }
  link.responses.publish();
  return taken;
}

}  // namespace crossrail::shm
