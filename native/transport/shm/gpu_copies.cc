// The initiator's side of GPU memory that its own GPU reaches: copied by that GPU, and not through the host.
//
// Starting a GPU copy takes a few microseconds, waiting for it some ten, so as many as possible run together:
// everything in a rail's queue that goes to the same region. Meanwhile the region's owner waits for us (touch), and so
// do we.
#include <algorithm>
#include <deque>
#include <string>
#include <vector>

#include "transport/shm/shm_transport.h"
#include "transport/wire_imm.h"
#include "util/clock.h"
#include "util/errors.h"

namespace crossrail::shm {

namespace {

Import& import_of(const WorkRequest& request) { return *static_cast<ShmKey*>(request.remote)->import; }

// Copies that are neighbours on both sides are merged.
struct Run {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  uint64_t bytes = 0;

  bool takes(const Run& next) {
    if (to + bytes != next.to || from + bytes != next.from) return false;
    bytes += next.bytes;
    return true;
  }
};

}  // namespace

static GpuReach import_for(const device::SharedRange& range, uint64_t length_bytes, int gpu) {
  GpuReach reach;
  reach.imported = std::make_unique<device::ImportedMemory>(range, length_bytes, gpu);
  reach.base = reach.imported->base();
  reach.by_kernels = true;
  return reach;
}

// Memory of our own process. A GPU's kernels fault on another GPU's memory unless it was mapped for them, too; the
// driver copies memory from cudaMalloc between any two GPUs. Throws TransportError if neither works.
static GpuReach reach_locally(const Import& import, int gpu) {
  const device::Driver* const driver = device::find_driver();
  CROSSRAIL_ASSERT(driver != nullptr);                                  // the memory was registered
  auto* const base = reinterpret_cast<std::byte*>(import.remote_base);  // NOLINT(performance-no-int-to-ptr)
  const bool is_its_own = [&] {
    const device::CurrentContext current(*driver, gpu);  // this thread has none, and the driver may need one
    return device::gpu_of(*driver, base) == gpu;
  }();
  if (is_its_own || import.shared.by == device::SharedBy::kIpc)
    return {.imported = nullptr, .base = base, .by_kernels = is_its_own};
  const auto own = device::MappedMemory::find(import.remote_base, import.length_bytes);
  if (own != nullptr && own->opens_to(gpu)) return {.imported = nullptr, .base = base, .by_kernels = true};
  device::SharedRange range = import.shared;
  if (range.by == device::SharedBy::kVmm)
    range.physical = device::PhysicalMemory::retain(import.remote_base, range.allocation_bytes, gpu);
  return import_for(range, import.length_bytes, gpu);
}

// How that GPU of ours reaches the region. Null: it does not, and import.why_staged says why.
const GpuReach* ShmTransport::reach_by_gpu(Import& import, int gpu) {
  const auto [entry, is_new] = import.reached.try_emplace(gpu);
  GpuReach& reach = entry->second;
  if (is_new) {
    try {
      reach = import.is_local ? reach_locally(import, gpu) : import_for(import.shared, import.length_bytes, gpu);
    } catch (const TransportError& error) {
      import.why_staged = error.text();
    }
  }
  return reach.base == nullptr ? nullptr : &reach;
}

// Whether a queued piece goes this way. One that was begun another way is finished that way.
bool ShmTransport::goes_by_gpu(const RailQueue::Pending& pending) {
  Import& import = import_of(pending.request);
  const int gpu = gpu_of(pending.request);
  if (!import.is_gpu || gpu < 0 || private_path_ != PrivatePath::kAuto || pending.done_bytes > 0 ||
      pending.read != nullptr)
    return false;
  return import.state != Import::State::kPrivate || reach_by_gpu(import, gpu) != nullptr;
}

// Copies everything at the head of the queue that goes to or comes from one region. False: nothing could be done.
bool ShmTransport::push_gpu_copies(Outgoing& link, RailQueue& rail) {
  const WorkRequest first = rail.pending.front().request;
  Import& import = import_of(first);
  const int gpu = gpu_of(first);
  if (import.state == Import::State::kPending) return false;
  if (import.state == Import::State::kRefused) return refuse_head(link, rail, import.status, import.text);
  if (!has_room(link, rail)) return false;  // for the immediates
  if (!touch(link, import.region_id)) {
    if (is_revoked(link, import.region_id))
      return refuse_head(link, rail, Status::kRegionRevoked, text_of_gone(Status::kRegionRevoked));
    ask(link, import);
    return false;
  }
  std::vector<WorkRequest> taken;
  taken.reserve(kPendingMax);
  const WorkRequest* counted = nullptr;  // the immediates of a batch share one entry, so that there is room for them
  while (!rail.pending.empty()) {
    const WorkRequest& next = rail.pending.front().request;
    if (&import_of(next) != &import || gpu_of(next) != gpu) break;
    if (next.has_imm && counted != nullptr && imm_of_wire(next.wire_imm) != imm_of_wire(counted->wire_imm)) break;
    taken.push_back(next);  // within the reserved capacity
    rail.pending.pop_front();
    if (taken.back().has_imm) counted = &taken.back();
  }
  const bool is_done = copy_by_gpu(import, gpu, taken);
  if (is_done) {
    for (const WorkRequest& each : taken) {
      if (each.has_imm) add_imm(rail, each.wire_imm);
    }
    flush_imms(link, rail);
  } else {
    take_rest_of(rail, &taken);
  }
  const std::string text = is_done ? "" : "not copied by the GPU: " + copier_.trouble();
  link.outstanding -= static_cast<uint32_t>(taken.size());
  for (const WorkRequest& each : taken) {
    sink_->on_retired(link, each.context, each.tag, 1, is_done ? each.length_bytes : 0,
                      is_done ? Status::kDone : Status::kTransportFailed, text);
  }
  return true;
}

// The pieces of a failed request that are still to come must not count.
void ShmTransport::take_rest_of(RailQueue& rail, std::vector<WorkRequest>* failed) {
  std::deque<RailQueue::Pending> kept;
  const size_t known = failed->size();
  for (const RailQueue::Pending& pending : rail.pending) {
    const bool is_its = std::any_of(failed->begin(), failed->begin() + static_cast<ptrdiff_t>(known),
                                    [&](const auto& each) { return each.context == pending.request.context; });
    if (is_its) {
      failed->push_back(pending.request);
    } else {
      kept.push_back(pending);
    }
  }
  rail.pending.swap(kept);
}

bool ShmTransport::refuse_head(Outgoing& link, RailQueue& rail, Status status, const std::string& text) {
  const WorkRequest refused = rail.pending.front().request;
  rail.pending.pop_front();
  --link.outstanding;
  sink_->on_retired(link, refused.context, refused.tag, 1, 0, status, text);
  return true;
}

bool ShmTransport::copy_by_gpu(Import& import, int gpu, const std::vector<WorkRequest>& requests) {
  const GpuReach& reach = *reach_by_gpu(import, gpu);
  const auto copy = [&](const Run& run) {
    if (reach.by_kernels) {
      copier_.begin_between(gpu, run.to, run.from, run.bytes);
    } else {
      copier_.begin(gpu, run.to, run.from, run.bytes);
    }
  };
  const int64_t begin = now_ns();
  Run run;
  uint64_t bytes = 0;
  for (const WorkRequest& each : requests) {
    std::byte* const remote = reach.base + each.remote_offset;
    const bool is_write = each.op == WorkOp::kWrite;
    const Run next{is_write ? remote : each.local, is_write ? each.local : remote, each.length_bytes};
    bytes += each.length_bytes;
    if (run.takes(next)) continue;
    copy(run);
    run = next;
  }
  copy(run);
  if (!copier_.finish()) return false;
  import.was_copied_by_gpu = true;
  import.bytes_moved += bytes;
  import.timed_bytes += bytes;
  import.timed_ns += now_ns() - begin;
  return true;
}

}  // namespace crossrail::shm
