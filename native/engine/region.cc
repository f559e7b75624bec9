#include "engine/region.h"

#include <sys/mman.h>

#include <algorithm>
#include <thread>

#include "engine/core.h"
#include "engine/engine.h"
#include "util/mutation.h"

namespace crossrail {

Region::Region(Ref<Engine> engine, LocalRegions local, Access access)
    : engine_(std::move(engine)),
      local_(std::move(local)),
      base_(local_.base()),
      length_bytes_(local_.length_bytes()),
      access_(access) {
  descriptor_.owner = engine_->address();
  descriptor_.region_id = local_.id();
  descriptor_.length_bytes = length_bytes_;
  descriptor_.access = access;
  engine_->core().transports().describe(local_, &descriptor_);
}

Region::~Region() {
  if (engine_->core().forked()) {
    local_.leak();  // its locks may be held for ever in this process
    return;
  }
  engine_->core().region_gone();
}

const Clock& Region::clock() const { return engine_->clock(); }
bool Region::is_mapped() const { return local_.is_mapped(); }

void Region::begin_close() {
  uint8_t expected = kOpen;
  if (!phase_.compare_exchange_strong(expected, kClosing, std::memory_order_seq_cst)) return;
  if (!engine_->core().forked()) engine_->core().transports().revoke_region(local_);
}

WaitResult Region::close(Deadline deadline, const InterruptCheck& interrupted) {
  begin_close();
  if (phase_.load(std::memory_order_acquire) == kClosed || engine_->core().forked()) return WaitResult::kReady;
  // Submitters first: one that stops being one has begun its operation, if it goes on. The loads of inflight_ops pair
  // with the release in EngineCore::finish.
  const auto quiet = [this] {
    EngineCore& core = engine_->core();
    if (is_mutated(Mutation::kSkipCloseWait)) return true;
    return !core.is_submitting() && inflight_ops() == 0 && core.transports().is_region_quiet(local_);
  };
  WaitResult result = WaitResult::kReady;
  if (!quiet()) {
    const auto nap = [&](Deadline until) {
      std::this_thread::sleep_for(std::chrono::nanoseconds(std::clamp<int64_t>(until - now_ns(), 0, 200'000)));
    };
    result = engine_->core().wait_until(quiet, nap, deadline, interrupted);
    // A closed engine's own work is over; only a peer can still be at it.
    if (result == WaitResult::kClosed) result = quiet() ? WaitResult::kReady : WaitResult::kTimeout;
  }
  if (result == WaitResult::kReady) phase_.store(kClosed, std::memory_order_release);
  return result;
}

RemoteRegion::RemoteRegion(Ref<Peer> peer, RegionDescriptor descriptor)
    : peer_(std::move(peer)), descriptor_(std::move(descriptor)) {}
RemoteRegion::~RemoteRegion() = default;

}  // namespace crossrail
