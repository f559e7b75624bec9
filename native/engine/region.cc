#include "engine/region.h"

#include <algorithm>

#include "engine/core.h"
#include "engine/engine.h"
#include "engine/wait_until.h"
#include "util/mutation.h"

namespace crossrail {

namespace {

constexpr int64_t kAskEveryNs = 200'000;

}  // namespace

Region::Region(Ref<Engine> engine, LocalRegions local, Access access, std::shared_ptr<device::MappedMemory> own)
    : engine_(std::move(engine)),
      own_(std::move(own)),
      local_(std::move(local)),
      base_(local_.base()),
      length_bytes_(local_.length_bytes()),
      access_(access),
      is_mapped_(local_.is_mapped()),
      memory_(local_.memory()),
      is_plain_(memory_ == MemoryKind::kHost && !local_.is_for_mapping()),
      gpu_(local_.gpu()),
      needs_flush_(local_.needs_flush()),
      given_by_(local_.given_by()) {
  descriptor_.owner = engine_->address();
  descriptor_.length_bytes = length_bytes_;
  descriptor_.access = access;
  descriptor_.memory = memory_;
  if (needs_flush_) engine_->core().flush_gpu_before_counts(gpu_);
  show(local_);
  engine_->core().region_made();
}

Region::~Region() {
  if (engine_->core().forked()) {  // the transports' locks may stay locked for ever in this process
    local_.leak();
    if (shown_) shown_->leak();
    if (first_) first_->leak();
    return;
  }
  hide(Why::kClosed);
  // relaxed: whoever closed it held a reference; whoever drops the last one acquires what preceded the other drops.
  if (phase_.load(std::memory_order_relaxed) != kClosed) engine_->core().region_gone();
}

const Clock& Region::clock() const { return engine_->clock(); }

// Lets peers name it by this id.
void Region::show(const LocalRegions& region) {
  descriptor_.region_id = region.id();
  engine_->core().transports().describe(region, &descriptor_);
  engine_->core().named_regions().add(region.id(), this);
  shown_id_.store(region.id(), std::memory_order_seq_cst);
}

// The reason is stored first: a RegionUse that finds itself over asks for it.
void Region::hide(Why why) {
  const uint64_t id = shown_id_.load(std::memory_order_relaxed);  // changed under fencing_, or by the last owner
  if (id != 0) engine_->core().named_regions().remove(id, why == Why::kRevoked);
  shown_id_.store(0, std::memory_order_seq_cst);
}

// relaxed: the caller holds the mutex of NamedRegions, which ~Region takes before any part of it is destroyed.
bool Region::try_add_ref() {
  uint64_t uses = uses_.load(std::memory_order_relaxed);
  do {
    if (static_cast<uint32_t>(uses) == 0) return false;
  } while (!uses_.compare_exchange_weak(uses, uses + 1, std::memory_order_relaxed));
  return true;
}

// --- a peer's use ---

RegionUse::RegionUse(RegionRef region, uint64_t id) : region_(std::move(region)), id_(id) {
  region_->peer_uses_.fetch_add(1, std::memory_order_seq_cst);
  if (is_over()) reset();
}

RegionUse& RegionUse::operator=(RegionUse&& other) noexcept {
  if (this == &other) return *this;
  reset();
  region_ = std::move(other.region_);
  id_ = other.id_;
  return *this;
}

void RegionUse::reset() {
  // release: pairs with the load in is_quiet() and is_fence_up(), after which the memory may be written.
  if (region_) region_->peer_uses_.fetch_sub(1, std::memory_order_release);
  region_ = nullptr;
}

RegionDescriptor Region::descriptor() const {
  std::lock_guard lock(fencing_);
  if (revoked()) throw UsageError("the region is revoked: it has no descriptor that peers could use until renew()");
  return descriptor_;
}

// --- waiting ---

// Like EngineCore::wait_until, but continues when the engine is closed: the engine's own work is over then, but a peer
// that was stopped in the middle of an access may still touch the memory.
WaitResult Region::wait_until(const std::function<bool()>& ready, Deadline deadline,
                              const InterruptCheck& interrupted) {
  if (ready()) return WaitResult::kReady;
  WaitResult result = engine_->core().wait_until(ready, nap, deadline, interrupted);
  // Nobody would drive a simulated peer meanwhile.
  if (result == WaitResult::kClosed && engine_->core().is_simulated())
    return ready() ? WaitResult::kReady : WaitResult::kTimeout;
  while (result == WaitResult::kClosed) {
    if (ready()) return WaitResult::kReady;
    const int64_t now = now_ns();
    if (now >= deadline) return WaitResult::kTimeout;
    if (interrupted.is_due(now) && interrupted.ask(now)) return WaitResult::kInterrupted;
    take_nap(deadline);
  }
  return result;
}

// Never blocks: the caller may be the progress holder. Another thread may have completed the revocation, and renewed
// since.
bool Region::is_fence_up() const {
  const std::unique_lock lock(fencing_, std::try_to_lock);
  if (lock && fence_.load(std::memory_order_relaxed) != kRevoking) return true;
  return lock && shown_ && peer_uses_.load(std::memory_order_seq_cst) == 0 &&
         engine_->core().transports().is_region_quiet(*shown_);
}

// Likewise. Submitters first: a submit under way either has begun its operation by the time it ends, or fails. The
// loads of inflight_ops pair with the release in EngineCore::finish. No NIC is asked to forget what our own transfers
// still use.
bool Region::is_quiet() const {
  EngineCore& core = engine_->core();
  if (core.is_submitting() || inflight_ops() != 0) return false;
  const std::unique_lock lock(fencing_, std::try_to_lock);
  return lock && peer_uses_.load(std::memory_order_seq_cst) == 0 && core.transports().is_region_quiet(local_) &&
         (!shown_ || core.transports().is_region_quiet(*shown_));
}

bool Region::quarantined() const {
  if (engine_->core().forked()) return false;
  // acquire, both: pair with the releases of whoever saw the last use end: poll_close() and revoke().
  if (closed()) return phase_.load(std::memory_order_acquire) != kClosed && inflight_ops() == 0 && !is_quiet();
  return fence_.load(std::memory_order_acquire) == kRevoking;
}

std::vector<std::string> Region::users() const {
  if (engine_->core().forked()) return {};
  EngineCore& core = engine_->core();
  std::vector<std::string> names;
  std::lock_guard lock(fencing_);
  core.look_as_holder([&] { names = core.transports().users_of(shown_ ? *shown_ : local_); });
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

// --- locking peers out ---

WaitResult Region::revoke(Deadline deadline, const InterruptCheck& interrupted) {
  EngineCore& core = engine_->core();
  core.check_usable();
  {
    std::lock_guard lock(fencing_);
    if (closed()) throw UsageError("the region is closed: peers are refused already");
    if (fence_.load(std::memory_order_relaxed) == kAdmitted) {
      TransportSet& transports = core.transports();
      if (shown_) {
        hide(Why::kRevoked);
        transports.revoke_region(*shown_);
      } else {
        LocalRegions own = transports.register_memory(base_, length_bytes_, Access::kLocal, memory_);
        hide(Why::kRevoked);
        transports.revoke_region(local_);
        core.run_as_holder([&] { local_.swap(own); });
        shown_.emplace(std::move(own));
      }
      fence_.store(kRevoking, std::memory_order_release);
    }
  }
  WaitResult result = move_own_transfers(deadline, interrupted);
  if (result == WaitResult::kReady) {
    result = wait_until(
        [this] { return is_mutated(Mutation::kKeepOldKey) || is_fence_up() || is_mutated(Mutation::kSkipFenceWait); },
        deadline, interrupted);
  }
  if (result != WaitResult::kReady) return result;
  engine_->core().count_arrivals();
  std::lock_guard lock(fencing_);
  if (fence_.load(std::memory_order_relaxed) == kRevoking) fence_.store(kRevoked, std::memory_order_release);
  return WaitResult::kReady;
}

// A NIC cannot forget the registration that peers know while works of our own use that very registration. Asking takes
// the progress holder, so this cannot be a condition of wait_until.
WaitResult Region::move_own_transfers(Deadline deadline, const InterruptCheck& interrupted) {
  EngineCore& core = engine_->core();
  for (;;) {
    bool moved = false;
    if (core.closed()) return WaitResult::kReady;  // no work of our own is left
    core.run_as_holder([&] {
      const std::unique_lock lock(fencing_, std::try_to_lock);
      moved = lock && (fence_.load(std::memory_order_relaxed) != kRevoking || !shown_ ||
                       core.transports().move_source(*shown_, local_));
    });
    if (moved) return WaitResult::kReady;
    const Deadline next = std::min(deadline, clock().now_ns() + kAskEveryNs);
    const WaitResult result = core.wait_until([] { return false; }, nap, next, interrupted);
    if (result == WaitResult::kInterrupted) return result;
    if (clock().now_ns() >= deadline) return WaitResult::kTimeout;
  }
}

void Region::renew() {
  engine_->core().check_usable();
  std::lock_guard lock(fencing_);
  if (closed()) throw UsageError("the region is closed");
  switch (fence_.load(std::memory_order_relaxed)) {
    case kAdmitted:
      throw UsageError("the region is not revoked: peers use it by its present descriptor");
    case kRevoking:
      throw UsageError("a peer may still be using the region: call revoke() again until it returns");
    default:
      break;
  }
  LocalRegions fresh = engine_->core().transports().register_memory(base_, length_bytes_, access_, memory_);
  if (shown_ && !first_) first_.emplace(std::move(*shown_));
  shown_.emplace(std::move(fresh));
  show(*shown_);
  fence_.store(kAdmitted, std::memory_order_release);
}

// --- closing ---

void Region::begin_close() {
  if (closed()) return;
  const bool forked = engine_->core().forked();
  // Before the phase changes: a second closer, which finds the region closing, must find the lock taken (is_quiet)
  // until peers are refused, too. A forked child's copy of the lock may stay locked for ever.
  std::unique_lock lock(fencing_, std::defer_lock);
  if (!forked) lock.lock();
  uint8_t expected = kOpen;
  if (!phase_.compare_exchange_strong(expected, kClosing, std::memory_order_seq_cst) || forked) return;
  hide(Why::kClosed);
  engine_->core().transports().revoke_region(local_);
  if (shown_ && !revoked()) engine_->core().transports().revoke_region(*shown_);
}

WaitResult Region::close(Deadline deadline, const InterruptCheck& interrupted, bool drain) {
  if (poll_close()) return WaitResult::kReady;
  if (!drain && !cancels_ops_.exchange(true, std::memory_order_relaxed)) engine_->core().request_cancel_scan();
  return wait_until([this] { return poll_close(); }, deadline, interrupted);
}

bool Region::poll_close() {
  begin_close();
  // acquire: pairs with the exchange below by another thread: what ended the last use is over for us, too.
  if (phase_.load(std::memory_order_acquire) == kClosed || engine_->core().forked()) return true;
  if (!is_mutated(Mutation::kSkipCloseWait) && !is_quiet()) return false;
  if (phase_.exchange(kClosed, std::memory_order_acq_rel) != kClosed) engine_->core().region_gone();
  return true;
}

RemoteRegion::RemoteRegion(Ref<Peer> peer, RegionDescriptor descriptor)
    : peer_(std::move(peer)), descriptor_(std::move(descriptor)) {}
RemoteRegion::~RemoteRegion() = default;

}  // namespace crossrail
