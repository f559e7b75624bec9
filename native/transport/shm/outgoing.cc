// The initiator's side: direct copies, their immediates, and what post() does with each work request.
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <numeric>
#include <utility>

#include "transport/shm/shm_transport.h"
#include "transport/wire_imm.h"
#include "util/clock.h"
#include "util/copy.h"

namespace crossrail::shm {

namespace {

constexpr uint64_t kTimedBytesMin = 64 << 10;  // shorter copies are not worth reading the clock twice

// Whatever is queued behind it, short or not, waits for all of it.
constexpr uint64_t kPendingBytesMax = uint64_t{256} << 20;
constexpr uint64_t kLongBytes = uint64_t{1} << 20;  // of shorter works as many as fit are soon done

uint64_t bytes_of(const std::deque<RailQueue::Pending>& pending) {
  return std::accumulate(pending.begin(), pending.end(), uint64_t{0}, [](uint64_t sum, const auto& each) {
    return sum + each.request.length_bytes - each.done_bytes;
  });
}

// Whether lies_behind() holds for what cross-memory attach would copy.
bool goes_behind(const WorkRequest& request) {
  const Import& import = *static_cast<ShmKey*>(request.remote)->import;
  const auto* remote = reinterpret_cast<const std::byte*>(import.remote_base + request.remote_offset);
  return request.op == WorkOp::kWrite ? lies_behind(remote, request.local) : lies_behind(request.local, remote);
}

}  // namespace

// --- touching a peer's region directly ---

static const std::atomic<uint64_t>& open_id_of(const Outgoing& link, uint64_t region_id) {
  return link.home->open->ids[region_slot(region_id)];
}

// That it was open we know: its owner told us about it. A mark says that it was revoked. Without one the slot may
// belong, or have belonged, to another region by now, and only the owner knows what became of this one: it has to be
// asked.
bool ShmTransport::is_revoked(const Outgoing& link, uint64_t region_id) {
  return open_id_of(link, region_id).load(std::memory_order_relaxed) == (region_id | kRevokedId);
}

bool ShmTransport::is_open(const Outgoing& link, uint64_t region_id) {
  return open_id_of(link, region_id).load(std::memory_order_seq_cst) == region_id;
}

// Announces that we are about to access the region, then checks that it is still open. From true until clear_hazards()
// the owner's close() waits for us. The store and the load are seq_cst, and so are the owner's withdrawal of the id and
// its check of the hazard (RegionTable::withdraw, is_region_quiet): at least one side sees the other.
// Even if already announced, we check, so that a process that was frozen meanwhile stops here and not some copies
// later; the owner waits for us in any case, so relaxed is sufficient.
bool ShmTransport::touch(Outgoing& link, uint64_t region_id) {
  const std::atomic<uint64_t>& open_id = open_id_of(link, region_id);
  if (link.hazard == region_id && open_id.load(std::memory_order_relaxed) == region_id) return true;
  if (hazardous_ != nullptr && hazardous_ != &link) clear_hazards();
  link.segment->hazard.store(region_id, std::memory_order_seq_cst);
  link.hazard = region_id;
  hazardous_ = &link;
  if (open_id.load(std::memory_order_seq_cst) == region_id) return true;
  // Count first what has landed: whoever waits for the hazard to be cleared assumes that everything counted is there by
  // then.
  for (RailQueue& rail : link.rails) flush_imms(link, rail);
  clear_hazards();
  return false;
}

void ShmTransport::clear_hazards() {
  if (hazardous_ == nullptr) return;
  // release: our copies are finished, and their counts are published, before the owner can see the hazard cleared.
  // Pairs with its check in RegionTable::is_touched(), after which it counts what has arrived and revoke() returns.
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

// False: the kernel refused; the link stages from now on.
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
      link.settle_private_path(PrivateChoice::Way::kStaged,
                               std::string("cross-memory attach is not possible here (") +
                                   std::strerror(got < 0 ? errno : EFAULT) +
                                   "); Yama's ptrace_scope, a seccomp filter or another pid namespace forbids it");
      return false;
    }
    moved += static_cast<uint64_t>(got);
  }
  const int64_t spent = now_ns() - begin;
  import.bytes_moved += moved;
  import.timed_bytes += moved;
  import.timed_ns += spent;
  PrivateChoice& choice = link.choices[request.bulk];
  PrivateChoice::Attaching& attaching = choice.attaching[goes_behind(request)];
  attaching.trial.add(moved, spent);
  if (attaching.way == PrivateChoice::Way::kTry) weigh_private_paths(link, choice);
  if (choice.is_outdated()) choice.try_again();
  return true;
}

// --- immediates of direct copies: gathered, then published in one entry after the bytes are in place ---

bool ShmTransport::room_for_imm(Outgoing& link, RailQueue& rail, uint32_t wire) {
  for (uint32_t i = 0; i < rail.open_imm_count; ++i) {
    if (rail.open_imms[i].imm == imm_of_wire(wire)) return true;
  }
  if (rail.open_imm_count == kImmPairsMax) flush_imms(link, rail);
  // An open entry has reserved its place in the ring: nothing else is published on this rail before it.
  return rail.open_imm_count > 0 || has_room(link, rail);
}

// Room for one more entry: the target has consumed the previous one in that slot, and we have retired it.
bool ShmTransport::has_room(Outgoing& link, RailQueue& rail) {
  const auto holds_one_more = [&] {
    if (!rail.writer.has_room()) return false;
    if (!rail.inflight || rail.writer.position() - rail.retired < kRingEntries) return true;
    retire_staged(link, rail);
    return rail.writer.position() - rail.retired < kRingEntries;
  };
  if (holds_one_more()) return true;
  if (!link.awaits_progress()) link.moved_ns = now_ns();
  if (!std::exchange(rail.was_full, true)) ++link.full_queues;
  return false;
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
  ring_later(*link.home, kForWork);
}

// --- posting ---

uint32_t ShmTransport::post(Link& base, uint32_t rail_index, std::span<const WorkRequest> requests,
                            uint32_t* completed) {
  auto& link = static_cast<Outgoing&>(base);
  *completed = 0;
  if (!link.up) return 0;
  uint32_t accepted = 0;
  if (requests.front().op == WorkOp::kSend) {
    accepted = post_messages(link, link.messages, EntryKind::kMessage, requests);
  } else if (requests.front().op == WorkOp::kService) {
    const size_t room = kServicesQueuedMax - std::min(kServicesQueuedMax, link.services.staged_inflight);
    accepted = post_messages(link, link.services, EntryKind::kService, requests.first(std::min(room, requests.size())));
  } else {
    RailQueue& rail = link.rails[rail_index];
    rail.writer.expect_entry();
    const size_t pending_before = rail.pending.size();
    while (accepted < requests.size()) {
      const WorkRequest* next = accepted + 1 < requests.size() ? &requests[accepted + 1] : nullptr;
      if (!post_one(link, rail, requests[accepted], next, completed)) break;
      ++accepted;
    }
    flush_imms(link, rail);
    if (pending_before == 0 && !rail.pending.empty() && !gpu_copies_wait_ && push_pending(link, rail) > 0)
      ring_later(*link.home, kForWork);
  }
  return accepted;
}

// Whether bytes of that transfer are in flight through the staging ring, or queued for it.
bool ShmTransport::is_staging(const RailQueue& rail, const void* context) {
  const auto is_its = [&](const RailQueue::Pending& pending) { return pending.request.context == context; };
  if (std::any_of(rail.pending.begin(), rail.pending.end(), is_its)) return true;
  for (uint64_t at = rail.retired; rail.staged_inflight > 0 && at < rail.writer.position(); ++at) {
    const InFlight& slot = rail.inflight[at % kRingEntries];
    if (slot.staged && slot.context == context) return true;
  }
  return false;
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
    sink_->on_retired(link, request.context, request.tag, 1, 0, status, text);
    return true;
  };
  const auto refuse_gone = [&] {
    if (is_revoked(link, import.region_id)) return refuse(Status::kRegionRevoked, text_of_gone(Status::kRegionRevoked));
    ask(link, import);  // the work waits for the answer
    return false;
  };
  if (import.state == Import::State::kRefused) {
    if (import.ask_again_ns == 0 || now_ns() < import.ask_again_ns) return refuse(import.status, import.text);
    import.ask_again_ns = 0;
    ask(link, import);
    return false;
  }
  const auto needed = request.op == WorkOp::kWrite ? Access::kRemoteWrite : Access::kRemoteRead;
  if (!allows(import.access, needed)) {
    return refuse(Status::kAccessDenied, request.op == WorkOp::kWrite ? "the region is not open for remote writes"
                                                                      : "the region is not open for remote reads");
  }
  if (!fits(request.remote_offset, request.length_bytes, import.length_bytes)) {
    return refuse(Status::kOutOfBounds, "offset " + std::to_string(request.remote_offset) + " + " +
                                            std::to_string(request.length_bytes) + " bytes exceed the region's " +
                                            std::to_string(import.length_bytes));
  }
  // As in touch(): the hazard is about to name another region. Done before looking for room, since it needs some.
  if (rail.open_imm_count > 0 && link.hazard != import.region_id) flush_imms(link, rail);
  if (request.has_imm && !room_for_imm(link, rail, request.wire_imm)) return false;
  const bool is_gpu = import.is_gpu || gpu_of(request) >= 0;  // a CPU cannot copy this straight into place
  if (import.is_gpu && private_path_ == PrivatePath::kAuto && import.lacks_handle() && gpu_of(request) >= 0) {
    import.wants_handle = true;
    ask(link, import);  // the work waits for the answer
    return false;
  }
  bool done = false;
  if (import.state == Import::State::kDirect && !is_gpu) {
    if (!copy_direct(link, request, next)) return refuse_gone();
    done = true;
  } else if (request.length_bytes == 0) {
    done = true;
  } else if (
      !is_gpu && (request.length_bytes >= kAttachBytesMin || private_path_ == PrivatePath::kCrossMemoryAttach) &&
      link.choices[request.bulk].attaches(goes_behind(request)) &&
      // Staged work may still be taken back, even out of the ring (withdraw_queue, flush_link): nothing must count it
      // then, and what is taken back of a transfer must be its tail. So whatever follows it is staged, too.
      !is_staging(rail, request.context)) {
    if (!touch(link, import.region_id)) return refuse_gone();
    done = copy_attached(link, request);
  }
  if (done) {
    if (request.has_imm) add_imm(rail, request.wire_imm);
    ++*completed;
    return true;
  }
  if (rail.pending.size() >= kPendingMax) return false;
  if (request.length_bytes >= kLongBytes && bytes_of(rail.pending) >= kPendingBytesMax) return false;
  rail.pending.push_back({request});
  // Not at once: the more there are, the fewer times we have to wait.
  gpu_copies_wait_ = gpu_copies_wait_ || goes_by_gpu(rail.pending.back());
  if (link.outstanding++ == 0) link.moved_ns = now_ns();
  return true;
}

uint32_t ShmTransport::post_messages(Outgoing& link, RailQueue& queue, EntryKind kind,
                                     std::span<const WorkRequest> requests) {
  uint32_t accepted = 0;
  ChannelWriter& writer = queue.writer;
  writer.expect_entry();
  for (const WorkRequest& request : requests) {
    uint64_t stage_at = 0;
    if (!has_room(link, queue)) break;
    std::byte* block = writer.reserve(request.length_bytes, &stage_at);
    if (block == nullptr) break;
    if (request.length_bytes > 0)
      copy_cached(block, request.local, request.length_bytes);  // null is no valid source, even for 0 bytes
    InFlight& slot = inflight_slot(queue);
    slot = {.context = request.context,
            .bytes = request.length_bytes,
            .stage_head = writer.stage_head(),
            .tag = request.tag,
            .retires = 1,
            .staged = true,
            .cut = false,
            .timed = Timed::kNot,
            .failed = false,
            .wanted_back = false};
    ++queue.staged_inflight;
    Entry& entry = writer.next();
    entry.kind = kind;
    entry.work = {.region_id = 0,
                  .offset = 0,
                  .stage_at = stage_at,
                  .stage_bytes = static_cast<uint32_t>(request.length_bytes),
                  .pieces = 0,
                  .imm = 0,
                  .units = 0,
                  .tag = 0,
                  .is_bulk = 0};
    writer.publish(entry);
    if (link.outstanding++ == 0) link.moved_ns = now_ns();
    ++accepted;
  }
  if (accepted > 0) ring_later(*link.home, kForWork);
  return accepted;
}

}  // namespace crossrail::shm
