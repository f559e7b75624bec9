// The initiator's side: direct copies, staging, reads, and what becomes of them.
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <new>
#include <utility>

#include "transport/shm/shm_transport.h"
#include "transport/wire_imm.h"
#include "util/clock.h"
#include "util/copy.h"
#include "util/errors.h"

namespace crossrail::shm {

namespace {

constexpr uint64_t kTimedBytesMin = 64 << 10;         // shorter copies are not worth two looks at the clock
constexpr uint64_t kAttachBytesMin = 64 << 10;        // below, staging packs pieces and beats a system call each
constexpr uint64_t kTrialBytes = uint64_t{32} << 20;  // moved each way before the private paths are compared,
constexpr uint64_t kTrialWindowBytes = uint64_t{4}
                                       << 20;  // by their best windows: cold starts and preemption are noise
constexpr double kAttachMargin = 1.15;  // attaching costs the initiator alone, but stalls on the kernel's page work
constexpr uint32_t kChunksPerPoll = 4;
constexpr int64_t kPingAfterNs = 100'000'000;
constexpr int64_t kFrozenAfterNs = 250'000'000;

double gb_per_s(uint64_t bytes, int64_t ns) {
  return ns > 0 ? static_cast<double>(bytes) / static_cast<double>(ns) : 0;
}

std::string format_rate(double rate) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f GB/s", rate);
  return text;
}

// A status byte out of shared memory.
Status status_from_peer(uint8_t byte) {
  if (byte == 0 || byte == kEntryTaken) return Status::kDone;
  return byte <= static_cast<uint8_t>(Status::kTransportFailed) ? static_cast<Status>(byte) : Status::kTransportFailed;
}

// What /proc says of the process: 'T' is stopped. Empty when it cannot be seen.
std::string process_state(uint32_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (pid == 0 || !std::getline(file, line)) return {};
  const size_t after_name = line.rfind(") ");
  if (after_name == std::string::npos || after_name + 2 >= line.size()) return {};
  const char state = line[after_name + 2];
  return state == 'T' || state == 't' ? "it is stopped (SIGSTOP or a debugger)"
                                      : std::string("its process state is ") + state;
}

}  // namespace

// --- touching a peer's region directly ---

// Announces that we are about to touch the region, then checks that it is still open. From true until clear_hazards()
// the owner's close() waits for us. The store and the load are seq_cst, and so are the owner's withdrawal of the id and
// its look at the hazard (RegionTable::revoke, is_region_quiet): one of the two sides sees the other.
bool ShmTransport::touch(Outgoing& link, uint64_t region_id) {
  if (link.hazard == region_id) return true;
  if (hazardous_ != nullptr && hazardous_ != &link) clear_hazards();
  link.segment->hazard.store(region_id, std::memory_order_seq_cst);
  link.hazard = region_id;
  hazardous_ = &link;
  const uint64_t slot = region_id & (kRegionSlots - 1);
  if (link.home->region_ids[slot].load(std::memory_order_seq_cst) == region_id) return true;
  clear_hazards();
  return false;
}

void ShmTransport::clear_hazards() {
  if (hazardous_ == nullptr) return;
  // release: our copies are finished before the owner can see the hazard gone.
  hazardous_->segment->hazard.store(0, std::memory_order_release);
  hazardous_->hazard = 0;
  hazardous_ = nullptr;
  hazard_polls_ = 0;
}

bool ShmTransport::copy_direct(Outgoing& link, const WorkRequest& request, const WorkRequest* next) {
  Import& import = *static_cast<ShmKey*>(request.remote)->import;
  if (!touch(link, import.region_id)) return false;
  std::byte* remote = import.base + request.remote_offset;
  const bool is_write = request.op == WorkOp::kWrite;
  std::byte* target = is_write ? remote : request.local;
  const std::byte* source = is_write ? request.local : remote;
  import.bytes_moved += request.length_bytes;
  const bool timed = request.length_bytes >= kTimedBytesMin;
  const int64_t begin = timed ? now_ns() : 0;
  if (request.bulk) {
    const bool chained = next != nullptr && is_write;
    copy_streaming(target, source, request.length_bytes, chained ? next->local : nullptr,
                   chained ? next->length_bytes : 0);
    streamed_ = true;
  } else {
    copy_cached(target, source, request.length_bytes);
  }
  if (timed) {
    import.timed_bytes += request.length_bytes;
    import.timed_ns += now_ns() - begin;
  }
  return true;
}

// False: the kernel would not; the link stages from now on.
bool ShmTransport::copy_attached(Outgoing& link, const WorkRequest& request) {
  Import& import = *static_cast<ShmKey*>(request.remote)->import;
  const int64_t begin = now_ns();
  uint64_t moved = 0;
  while (moved < request.length_bytes) {
    iovec local{.iov_base = request.local + moved, .iov_len = request.length_bytes - moved};
    iovec remote{.iov_base = reinterpret_cast<void*>(import.remote_base + request.remote_offset + moved),
                 .iov_len = local.iov_len};
    const auto pid = static_cast<pid_t>(link.pid);
    const ssize_t got = request.op == WorkOp::kWrite ? process_vm_writev(pid, &local, 1, &remote, 1, 0)
                                                     : process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (got <= 0) {
      link.choice.phase = PrivateChoice::Phase::kStaged;
      link.choice.reason = std::string("cross-memory attach is not possible here (") +
                           std::strerror(got < 0 ? errno : EFAULT) +
                           "); Yama's ptrace_scope, a seccomp filter or another pid namespace forbids it";
      return false;
    }
    moved += static_cast<uint64_t>(got);
  }
  const int64_t spent = now_ns() - begin;
  import.bytes_moved += moved;
  import.timed_bytes += moved;
  import.timed_ns += spent;
  link.choice.attach.add(moved, spent, kTrialWindowBytes);
  return true;
}

// --- immediates of direct copies: gathered, then published in one entry after the bytes are in place ---

bool ShmTransport::room_for_imm(Outgoing& link, RailQueue& rail, uint32_t wire) {
  for (uint32_t i = 0; i < rail.open_imm_count; ++i) {
    if (rail.open_imms[i].imm == imm_of_wire(wire)) return true;
  }
  if (rail.open_imm_count == kImmPairsMax) flush_imms(link, rail);
  // An open entry has its place in the ring reserved: nothing else is published on this rail before it.
  return rail.open_imm_count > 0 || has_room(link, rail);
}

// Room for one more entry: the target has consumed the one that lay there, and we have retired it.
bool ShmTransport::has_room(Outgoing& link, RailQueue& rail) {
  if (!rail.writer.has_room()) return false;
  if (!rail.inflight || rail.writer.position() - rail.retired < kRingEntries) return true;
  retire_staged(link, rail);
  return rail.writer.position() - rail.retired < kRingEntries;
}

void ShmTransport::add_imm(RailQueue& rail, uint32_t wire) {
  const uint32_t imm = imm_of_wire(wire);
  for (uint32_t i = 0; i < rail.open_imm_count; ++i) {
    if (rail.open_imms[i].imm == imm) {
      rail.open_imms[i].units += units_of_wire(wire);
      return;
    }
  }
  rail.open_imms[rail.open_imm_count++] = {imm, units_of_wire(wire)};
}

void ShmTransport::flush_imms(Outgoing& link, RailQueue& rail) {
  if (streamed_) {
    copy_fence();
    streamed_ = false;
  }
  if (rail.open_imm_count == 0) return;
  Entry& entry = rail.writer.next();
  entry.kind = EntryKind::kImms;
  entry.count = static_cast<uint8_t>(rail.open_imm_count);
  for (uint32_t i = 0; i < rail.open_imm_count; ++i) entry.imms[i] = rail.open_imms[i];
  if (rail.inflight) rail.inflight[rail.writer.position() % kRingEntries].staged = false;
  rail.writer.publish(entry);
  rail.open_imm_count = 0;
  ring_later(*link.home);
}

// --- posting ---

uint32_t ShmTransport::post(Link& base, uint32_t rail_index, std::span<const WorkRequest> requests,
                            uint32_t* completed) {
  auto& link = static_cast<Outgoing&>(base);
  *completed = 0;
  if (!link.up) return 0;
  uint32_t accepted = 0;
  if (requests.front().op == WorkOp::kSend) {
    accepted = post_messages(link, requests);
  } else {
    RailQueue& rail = link.rails[rail_index];
    const size_t pending_before = rail.pending.size();
    while (accepted < requests.size()) {
      const WorkRequest* next = accepted + 1 < requests.size() ? &requests[accepted + 1] : nullptr;
      if (!post_one(link, rail, requests[accepted], next, completed)) break;
      ++accepted;
    }
    flush_imms(link, rail);
    if (pending_before == 0 && !rail.pending.empty() && push_pending(link, rail) > 0) ring_later(*link.home);
  }
  return accepted;
}

// False: no room now. True: done (counted in *completed), queued, or refused (retired).
bool ShmTransport::post_one(Outgoing& link, RailQueue& rail, const WorkRequest& request, const WorkRequest* next,
                            uint32_t* completed) {
  if (request.remote == nullptr) {  // a barrier: no region, only the immediate
    if (!room_for_imm(link, rail, request.wire_imm)) return false;
    add_imm(rail, request.wire_imm);
    ++*completed;
    return true;
  }
  Import& import = *static_cast<ShmKey*>(request.remote)->import;
  if (import.state == Import::State::kPending) return false;
  const auto refuse = [&](Status status, const std::string& text) {
    sink_->on_retired(link, request.context, 1, 0, status, text);
    return true;
  };
  if (import.state == Import::State::kRefused) return refuse(import.status, import.text);
  const auto needed = request.op == WorkOp::kWrite ? Access::kRemoteWrite : Access::kRemoteRead;
  if ((static_cast<uint8_t>(import.access) & static_cast<uint8_t>(needed)) != static_cast<uint8_t>(needed)) {
    return refuse(Status::kAccessDenied, request.op == WorkOp::kWrite ? "the region is not open for remote writes"
                                                                      : "the region is not open for remote reads");
  }
  if (request.length_bytes > import.length_bytes ||
      request.remote_offset > import.length_bytes - request.length_bytes) {
    return refuse(Status::kOutOfBounds, "offset " + std::to_string(request.remote_offset) + " + " +
                                            std::to_string(request.length_bytes) + " bytes exceed the region's " +
                                            std::to_string(import.length_bytes));
  }
  if (request.has_imm && !room_for_imm(link, rail, request.wire_imm)) return false;
  bool done = false;
  if (import.state == Import::State::kDirect) {
    if (!copy_direct(link, request, next)) return refuse(Status::kRegionClosed, "closed by its owner");
    done = true;
  } else if (request.length_bytes == 0) {
    done = true;
  } else if (link.choice.uses_attach() && (request.length_bytes >= kAttachBytesMin || private_path_ == 2)) {
    // An immediate does not pass bytes of its own transfer that wait to be staged, from before the path changed.
    const auto is_same = [&](const RailQueue::Pending& pending) { return pending.request.context == request.context; };
    if (request.has_imm && std::any_of(rail.pending.begin(), rail.pending.end(), is_same)) return false;
    if (!touch(link, import.region_id)) return refuse(Status::kRegionClosed, "closed by its owner");
    done = copy_attached(link, request);
    if (link.choice.phase == PrivateChoice::Phase::kTryAttach) weigh_private_paths(link);
  }
  if (done) {
    if (request.has_imm) add_imm(rail, request.wire_imm);
    ++*completed;
    return true;
  }
  if (rail.pending.size() >= kPendingMax) return false;
  rail.pending.push_back({request});
  if (link.outstanding++ == 0) link.moved_ns = now_ns();
  return true;
}

uint32_t ShmTransport::post_messages(Outgoing& link, std::span<const WorkRequest> requests) {
  uint32_t accepted = 0;
  ChannelWriter& writer = link.messages.writer;
  for (const WorkRequest& request : requests) {
    uint64_t stage_at = 0;
    if (!has_room(link, link.messages)) break;
    std::byte* block = writer.reserve(request.length_bytes, &stage_at);
    if (block == nullptr) break;
    if (request.length_bytes > 0)
      std::memcpy(block, request.local, request.length_bytes);  // null is no source, even of 0
    InFlight& slot = inflight_slot(link.messages);
    slot = {.context = request.context,
            .bytes = request.length_bytes,
            .stage_head = writer.stage_head(),
            .tag = request.tag,
            .retires = 1,
            .staged = true,
            .cut = false,
            .wanted_back = false};
    ++link.messages.staged_inflight;
    Entry& entry = writer.next();
    entry.kind = EntryKind::kMessage;
    entry.work = {.region_id = 0,
                  .offset = 0,
                  .stage_at = stage_at,
                  .stage_bytes = static_cast<uint32_t>(request.length_bytes),
                  .pieces = 0,
                  .wire_imm = 0,
                  .units = 0,
                  .tag = 0,
                  .reserved = 0};
    writer.publish(entry);
    if (link.outstanding++ == 0) link.moved_ns = now_ns();
    ++accepted;
  }
  if (accepted > 0) ring_later(*link.home);
  return accepted;
}

// The slot for the entry that is published next. Its array appears with the first staged entry of the rail.
InFlight& ShmTransport::inflight_slot(RailQueue& rail) {
  if (!rail.inflight) {
    rail.inflight.reset(static_cast<InFlight*>(std::calloc(kRingEntries, sizeof(InFlight))));
    if (!rail.inflight) throw std::bad_alloc();
    rail.retired = rail.writer.position();
  }
  return rail.inflight[rail.writer.position() % kRingEntries];
}

// --- staging ---

uint32_t ShmTransport::push_pending(Outgoing& link, RailQueue& rail) {
  uint32_t pushed = 0;
  while (pushed < kChunksPerPoll && !rail.pending.empty()) {
    const bool is_write = rail.pending.front().request.op == WorkOp::kWrite;
    if (!(is_write ? push_write_chunk(link, rail) : push_read_chunks(link, rail))) break;
    ++pushed;
  }
  return pushed;
}

// Stages one chunk: a part of a long piece, or many short pieces of one transfer that go to one region.
bool ShmTransport::push_write_chunk(Outgoing& link, RailQueue& rail) {
  if (!has_room(link, rail)) return false;
  const RailQueue::Pending& head = rail.pending.front();
  const WorkRequest& first = head.request;
  uint32_t pieces = 1;
  uint32_t finished = 0;
  uint64_t data_bytes = std::min(first.length_bytes - head.done_bytes, kStageChunkBytes);
  uint32_t units = 0;
  if (head.done_bytes + data_bytes == first.length_bytes) {
    finished = 1;
    units = first.has_imm ? units_of_wire(first.wire_imm) : 0;
    while (pieces < kStagedPiecesMax && pieces < rail.pending.size()) {
      const WorkRequest& next = rail.pending[pieces].request;
      if (next.op != WorkOp::kWrite || next.context != first.context || next.tag != first.tag ||
          next.remote != first.remote || next.has_imm != first.has_imm ||
          data_bytes + next.length_bytes > kStageChunkBytes) {
        break;
      }
      data_bytes += next.length_bytes;
      units += next.has_imm ? units_of_wire(next.wire_imm) : 0;
      ++pieces;
      ++finished;
    }
  }
  const uint64_t table_bytes = pieces * sizeof(StagedPiece);
  uint64_t stage_at = 0;
  // Blocks begin on a line, so that tables are aligned and neighbours do not share lines.
  const uint64_t block_bytes = (table_bytes + data_bytes + kLine - 1) / kLine * kLine;
  std::byte* block = rail.writer.reserve(block_bytes, &stage_at);
  if (block == nullptr) return false;
  auto* table = reinterpret_cast<StagedPiece*>(block);
  std::byte* data = block + table_bytes;
  uint64_t moved = 0;
  uint64_t retired_bytes = 0;
  for (uint32_t i = 0; i < pieces; ++i) {
    const RailQueue::Pending& pending = rail.pending[i];
    const uint64_t from = pending.done_bytes;
    // The head may have been staged in part before; whoever follows it goes whole.
    const uint64_t bytes = pieces == 1 ? data_bytes : pending.request.length_bytes - from;
    if (finished > 0) retired_bytes += pending.request.length_bytes;
    table[i] = {pending.request.remote_offset + from, static_cast<uint32_t>(bytes), 0};
    std::memcpy(data, pending.request.local + from, bytes);
    data += bytes;
    moved += bytes;
  }
  Import& import = *static_cast<ShmKey*>(first.remote)->import;
  import.bytes_moved += moved;
  inflight_slot(rail) = {.context = first.context,
                         .bytes = retired_bytes,
                         .stage_head = rail.writer.stage_head(),
                         .tag = first.tag,
                         .retires = finished,
                         .staged = true,
                         .cut = false,
                         .wanted_back = false};
  ++rail.staged_inflight;
  Entry& entry = rail.writer.next();
  entry.kind = EntryKind::kStagedWrite;
  entry.has_imm = units > 0 ? 1 : 0;
  entry.work = {.region_id = import.region_id,
                .offset = 0,
                .stage_at = stage_at,
                .stage_bytes = static_cast<uint32_t>(table_bytes + data_bytes),
                .pieces = pieces,
                .wire_imm = imm_of_wire(first.wire_imm),
                .units = units,
                .tag = 0,
                .reserved = first.bulk ? 1u : 0u};
  rail.writer.publish(entry);
  if (finished == 0) {
    rail.pending.front().done_bytes += data_bytes;
  } else {
    rail.pending.erase(rail.pending.begin(), rail.pending.begin() + finished);
  }
  return true;
}

// Asks for as much of the read at the head as there are free chunks.
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
      head.read = new StagedRead{request.context, request.tag, request.length_bytes, 0, false, Status::kDone};
      ++link.reads_open;
    }
    const uint64_t bytes = std::min(request.length_bytes - head.done_bytes, kReadChunkBytes);
    const auto slot = static_cast<uint32_t>(chunk - link.read_chunks.begin());
    const uint32_t tag = (chunk->tag / kReadChunks + 1) * kReadChunks + slot;  // never the one before
    *chunk = {head.read, request.local + head.done_bytes, static_cast<uint32_t>(bytes), tag};
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
                  .wire_imm = 0,
                  .units = 0,
                  .tag = tag,
                  .reserved = 0};
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
    slot.staged = false;
    --rail.staged_inflight;
    rail.writer.release_stage(slot.stage_head);
    ++retired;
    if (slot.context == nullptr) continue;  // withdrawn
    if (rail.sticky == Status::kDone) rail.sticky = status_from_peer(rail.writer.status_of(rail.retired));
    if (slot.retires == 0) continue;
    const Status outcome = std::exchange(rail.sticky, Status::kDone);
    link.outstanding -= slot.retires;
    if (slot.cut && outcome == Status::kDone) {
      report_withdrawn(link, slot.context, slot.tag, slot.retires, slot.bytes);
      continue;
    }
    link.staged_bytes += slot.bytes;
    sink_->on_retired(link, slot.context, slot.retires, slot.bytes, outcome,
                      outcome == Status::kDone ? "" : "refused by the target");
  }
  return retired;
}

uint32_t ShmTransport::take_responses(Outgoing& link) {
  uint32_t taken = 0;
  while (const Entry* entry = link.responses.peek()) {
    const uint32_t tag = entry->work.tag;
    const uint64_t stage_at = entry->work.stage_at;
    const uint32_t bytes = entry->work.stage_bytes;
    const uint8_t status = entry->has_imm;  // the response's status travels here
    ReadChunk& chunk = link.read_chunks[tag % kReadChunks];
    if (entry->kind == EntryKind::kReadResponse && chunk.tag == tag && chunk.read != nullptr) {
      StagedRead& read = *std::exchange(chunk.read, nullptr);
      const std::byte* block = link.responses.block(stage_at, bytes);
      if (status != 0) {
        read.status = status_from_peer(status);
      } else if (block == nullptr || bytes != chunk.bytes) {
        read.status = Status::kTransportFailed;
      } else {
        std::memcpy(chunk.local, block, bytes);
      }
      if (--read.chunks_open == 0 && read.all_requested) {
        --link.outstanding;
        --link.reads_open;
        sink_->on_retired(link, read.context, 1, read.status == Status::kDone ? read.bytes : 0, read.status,
                          read.status == Status::kDone ? "" : "refused by the target");
        delete &read;
      }
    }  // else: of a cancelled read
    link.responses.pop(0);
    if (link.responses_due > 0) --link.responses_due;
    ++taken;
  }
  link.responses.publish();
  return taken;
}

uint32_t ShmTransport::poll_outgoing(Outgoing& link, int64_t now) {
  const uint64_t staged_before = link.staged_bytes;
  uint32_t moved = retire_staged(link, link.messages);
  if (link.messages_wanted) moved += retry_messages(link);
  if (link.responses_due > 0) moved += take_responses(link);
  uint32_t pushed = 0;
  bool backlog = false;
  for (RailQueue& rail : link.rails) {
    moved += retire_staged(link, rail);
    if (!rail.pending.empty()) pushed += push_pending(link, rail);
    backlog = backlog || !rail.pending.empty();
  }
  // The staged path is timed only while it has as much work as it can take.
  if (link.backlog_ns != 0)
    link.choice.staged.add(link.staged_bytes - staged_before, now - link.backlog_ns, kTrialWindowBytes);
  link.backlog_ns = backlog ? now : 0;
  if (link.choice.phase == PrivateChoice::Phase::kTryStaged) weigh_private_paths(link);
  if (moved + pushed > 0) {
    ring_later(*link.home);
    link.moved_ns = now;
  } else {
    check_liveness(link, now);
  }
  return moved + pushed;
}

void ShmTransport::weigh_private_paths(Outgoing& link) {
  PrivateChoice& choice = link.choice;
  if (choice.phase == PrivateChoice::Phase::kTryStaged && choice.staged.bytes >= kTrialBytes) {
    if (link.pid == 0) {
      choice.phase = PrivateChoice::Phase::kStaged;
      choice.reason = "cross-memory attach is not possible: the peer is in another pid namespace";
    } else {
      choice.phase = PrivateChoice::Phase::kTryAttach;
    }
  } else if (choice.phase == PrivateChoice::Phase::kTryAttach && choice.attach.bytes >= kTrialBytes) {
    const bool attach_wins = choice.attach.best > kAttachMargin * choice.staged.best;
    choice.phase = attach_wins ? PrivateChoice::Phase::kAttach : PrivateChoice::Phase::kStaged;
    choice.reason = "measured on this link: staged " + format_rate(choice.staged.best) + ", cross-memory attach " +
                    format_rate(choice.attach.best);
  }
}

void ShmTransport::check_liveness(Outgoing& link, int64_t now) {
  if (link.frozen || now - link.moved_ns < kPingAfterNs) return;
  if (link.pinged_ns == 0) {
    link.pinged_ns = now;
    control_->ping(link.id);
  } else if (now - link.pinged_ns > kFrozenAfterNs) {
    link.frozen = true;
    const std::string state = process_state(link.pid);
    sink_->on_link_frozen(
        link, true, "process " + std::to_string(link.pid) + " does not answer" + (state.empty() ? "" : ": " + state));
  }
}

// --- taking back ---

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

// A request's chunks lie in the ring in order, and the target takes them in order: the last one carries the immediate
// and must go first, so that a target that overtakes us counts nothing it did not get.
void ShmTransport::withdraw_queue(Outgoing& link, RailQueue& rail, bool (*wanted)(void* context)) {
  withdraw_pending(link, rail, wanted);
  InFlight
      ending{};  // slot of the last chunk that was withdrawn, until its earlier chunks are out of the target's hands
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
      slot.context = nullptr;  // the slot stays: its staging is freed in turn
      slot.retires = 0;
    } else if (is_earlier_chunk) {  // the target is at it: the request ends when this chunk does
      slot.bytes = ending.bytes;
      slot.retires = std::exchange(ending.retires, 0);
      slot.cut = true;
    } else if (&rail == &link.messages) {
      slot.wanted_back = link.messages_wanted = true;
    }
  }
  // What is left began before everything in flight: its earlier chunks are confirmed, and their status is its.
  if (ending.retires > 0) rail.sticky = Status::kDone;
  settle();
}

// A target without a free buffer takes the message at its head and puts it back, over and over. One that was to be taken
// back just then is tried again until it is ours, or delivered.
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
    ++withdrawn;
    report_withdrawn(link, std::exchange(slot.context, nullptr), slot.tag, std::exchange(slot.retires, 0), slot.bytes);
  }
  return withdrawn;
}

// What has not (wholly) reached the ring. A request whose first chunks are there already ends with the last of these.
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
      rail.sticky = Status::kDone;  // it was this request's
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

// Ends everything on the link: what the target has confirmed as it was confirmed, the rest with `status`. The target
// executes nothing of it any more once it has seen `revoked`.
void ShmTransport::flush_link(Outgoing& link, Status status, const std::string& detail) {
  link.segment->revoked.store(1, std::memory_order_seq_cst);
  if (hazardous_ == &link) clear_hazards();
  const auto flush_queue = [&](RailQueue& rail) {
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
          sink_->on_retired(link, slot.context, slot.retires, 0, status, detail);
        }
      }
    }
    while (!rail.pending.empty()) {
      const RailQueue::Pending pending = rail.pending.front();
      rail.pending.pop_front();
      if (pending.read == nullptr) {
        sink_->on_retired(link, pending.request.context, 1, 0, status, detail);
      } else {
        pending.read->all_requested = true;  // ends below, with its chunks
        if (pending.read->chunks_open == 0) {
          sink_->on_retired(link, pending.read->context, 1, 0, status, detail);
          delete pending.read;
        }
      }
    }
  };
  if (link.up && link.responses_due > 0) take_responses(link);
  flush_queue(link.messages);
  for (RailQueue& rail : link.rails) flush_queue(rail);
  for (ReadChunk& chunk : link.read_chunks) {
    if (chunk.read == nullptr) continue;
    StagedRead& read = *std::exchange(chunk.read, nullptr);
    if (--read.chunks_open > 0) continue;
    sink_->on_retired(link, read.context, 1, 0, status, detail);
    delete &read;
  }
  for (auto& [region_id, import] : link.imports) {
    import->state = Import::State::kRefused;
    import->status = status;
    import->text = detail;
    import->map.reset();
  }
  link.reads_open = 0;
  link.responses_due = 0;
  link.outstanding = 0;
  link.imports_pending = 0;
  link.up = false;
}

// --- explaining ---

std::vector<PathReport> ShmTransport::explain(Link& base) {
  auto& link = static_cast<Outgoing&>(base);
  std::vector<PathReport> reports;
  for (const auto& [region_id, import] : link.imports) {
    PathReport report;
    report.what = "region " + std::to_string(region_id >> kRegionSlotBits) + " (" +
                  std::to_string(import->length_bytes) + " bytes)";
    report.bytes = import->bytes_moved;
    report.gb_per_s = gb_per_s(import->timed_bytes, import->timed_ns);
    switch (import->state) {
      case Import::State::kPending:
        report.path = "unresolved";
        report.reason = "waiting for the peer to describe the region";
        break;
      case Import::State::kRefused:
        report.path = "closed";
        report.reason = import->text.empty() ? "the peer has no such region (any more)" : import->text;
        break;
      case Import::State::kDirect:
        report.path = import->is_local ? "local" : "mapped";
        report.reason =
            import->is_local ? "both engines live in this process" : "the region is engine-owned memory, mapped here";
        break;
      case Import::State::kPrivate:
        report.path = link.choice.uses_attach() ? "cross-memory-attach" : "staged";
        report.reason = "the region is private memory of the peer; " + link.choice.reason;
        if (!link.choice.uses_attach()) report.gb_per_s = link.choice.staged.best;
        break;
    }
    reports.push_back(std::move(report));
  }
  return reports;
}

}  // namespace crossrail::shm
