// Registered memory, ours and our peers'.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "device/vmm.h"
#include "engine/transports.h"
#include "engine/waiting.h"
#include "transport/descriptor.h"
#include "transport/transport.h"
#include "util/clock.h"
#include "util/ref.h"

namespace crossrail {

class Engine;
class EngineCore;
class Peer;

// Local memory that transfers may use as source, and peers as target.
// Lifecycle: 1. open. 2. closing: no new submit, peers refused. 3. closed: nothing touches the memory any more.
// While it is open, peers may be locked out and let in again any number of times: admitted -> revoking -> revoked ->
// admitted, each time under an id and keys that were never used before. So a descriptor is valid for one generation
// only.
// Owner of the memory: the caller, from registration until close() has returned kReady; the engine for alloc() and
// alloc_on_gpu(). Threads: any.
class Region {
 public:
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  // relaxed: whoever adds a reference already holds one.
  void add_ref() { uses_.fetch_add(1, std::memory_order_relaxed); }
  void release() { drop(1); }

  const Engine* engine() const { return engine_.get(); }
  std::byte* base() const { return base_; }
  uint64_t length_bytes() const { return length_bytes_; }
  Access access() const { return access_; }
  MemoryKind memory() const { return memory_; }
  // Host memory that transfers may use: not from alloc_for_mapping().
  bool is_plain() const { return is_plain_; }
  // For GPU memory: the GPU's ordinal, else -1; and how the NICs got access to it, for people.
  int gpu() const { return gpu_; }
  const std::string& given_by() const { return given_by_; }
  // GPU memory that belongs to the engine and lives as long as this region; not memory that a user registered.
  bool is_own_gpu_memory() const { return own_ != nullptr; }
  // Engine-owned or shared memory: peers of this host can map it.
  bool is_mapped() const { return is_mapped_; }
  // For peers of the present generation. Throws UsageError while peers are locked out.
  RegionDescriptor descriptor() const;
  // Our transfers that read from it (or, for reads, write to it) now.
  uint32_t inflight_ops() const { return static_cast<uint32_t>(uses_.load(std::memory_order_seq_cst) >> 32); }
  // seq_cst: pairs with close(), see begin_op.
  bool closed() const { return phase_.load(std::memory_order_seq_cst) != kOpen; }

  // Locks peers out: refuses them from now on, and blocks until none of them can touch the memory any more. Our own
  // transfers continue to use it. Descriptors given out so far never work again. kTimeout: peers are refused, but one
  // is still using the memory (quarantined()): call again. Throws UsageError if closed, TransportError if a NIC refuses
  // to register the memory a second time; then nothing has changed.
  WaitResult revoke(Deadline deadline, const InterruptCheck& interrupted);
  // Lets peers in again, under a new descriptor. Throws UsageError unless revoke() has returned kReady, and
  // TransportError.
  void renew();
  // Peers are locked out, or being locked out.
  bool revoked() const { return fence_.load(std::memory_order_acquire) != kAdmitted; }

  // Refuses new use and blocks until neither our worker nor a peer touches the memory. Idempotent. kTimeout: still in
  // use, and still refusing: call again. drain: our own transfers with it run to their end; otherwise they are
  // cancelled first, which takes back whatever peers have not begun.
  WaitResult close(Deadline deadline, const InterruptCheck& interrupted, bool drain = true);
  // The same without waiting and without driving: returns whether it is closed now.
  bool poll_close();
  const Clock& clock() const;  // the clock of their deadlines
  // The first half of close(), which does not wait.
  void begin_close();

  // Peers are refused, yet one may still touch the memory: it must be neither freed nor reused.
  bool quarantined() const;
  // Names of the peers that keep it quarantined, as far as known.
  std::vector<std::string> users() const;
  // --- a peer's question about what is in it, answered by the progress holder (RegionUse) ---
  // Adds a reference for a caller that holds none. False: the region is being destroyed.
  bool try_add_ref();
  // Whether peers may name it by this id now.
  bool is_open_as(uint64_t id) const { return shown_id_.load(std::memory_order_seq_cst) == id; }

  // close() without drain is under way: transfers that use the region are to be cancelled. relaxed: asked again after
  // request_cancel_scan.
  bool cancels_ops() const { return cancels_ops_.load(std::memory_order_relaxed); }

 private:
  friend class Engine;
  friend class EngineCore;
  friend class RegionUse;
  Region(Ref<Engine> engine, LocalRegions local, Access access, std::shared_ptr<device::MappedMemory> own = {});
  ~Region();
  // A transfer's use: a reference and an operation in flight, in one atomic. seq_cst: a transfer begins and then checks
  // closed(), close() does the reverse: at least one sees the other.
  void begin_op() { uses_.fetch_add(kOneOp, std::memory_order_seq_cst); }
  // release: pairs with the acquire in inflight_ops(): close() sees our copies finished.
  void end_op() { drop(kOneOp); }
  void drop(uint64_t uses) {
    if (static_cast<uint32_t>(uses_.fetch_sub(uses, std::memory_order_acq_rel) - uses) == 0) delete this;
  }

  void show(const LocalRegions& region);
  enum class Why : uint8_t { kRevoked, kClosed };
  void hide(Why why);
  bool is_fence_up() const;
  bool is_quiet() const;
  WaitResult wait_until(const std::function<bool()>& ready, Deadline deadline, const InterruptCheck& interrupted);
  WaitResult move_own_transfers(Deadline deadline, const InterruptCheck& interrupted);

  const Ref<Engine> engine_;                         // declared first: the transports must outlive what follows
  const std::shared_ptr<device::MappedMemory> own_;  // for alloc_on_gpu(); must outlive what follows, too
  // The transports' halves. Before the first revoke(), local_ is all there is. Then peers and our own transfers part
  // ways: local_ is replaced by one that no peer knows (by the progress holder, who reads it without the mutex); shown_
  // is what peers know, or last knew; and first_ is what shown_ was before the first renew(): it may own the memory and
  // is therefore destroyed last.
  std::optional<LocalRegions> first_;
  std::optional<LocalRegions> shown_;
  LocalRegions local_;
  std::byte* const base_;
  const uint64_t length_bytes_;
  const Access access_;
  const bool is_mapped_;
  const MemoryKind memory_;
  const bool is_plain_;
  const int gpu_;
  const bool needs_flush_;
  const std::string given_by_;
  // Guards descriptor_, changes of fence_, and the three above against threads other than the progress holder. A thread
  // that may be the progress holder only tries to lock it: revoke() becomes the holder while it has the mutex.
  mutable std::mutex fencing_;
  RegionDescriptor descriptor_;
  // The id under which peers may name it; 0: none. seq_cst: a use is first counted and then checks this; whoever ends
  // all uses first clears this and then checks the count.
  std::atomic<uint64_t> shown_id_{0};
  std::atomic<uint32_t> peer_uses_{0};
  enum : uint8_t { kAdmitted, kRevoking, kRevoked };
  std::atomic<uint8_t> fence_{kAdmitted};
  std::atomic<bool> cancels_ops_{false};
  // Low half: references. High half: operations in flight; each holds a reference too.
  static constexpr uint64_t kOneOp = (uint64_t{1} << 32) + 1;
  std::atomic<uint64_t> uses_{1};
  enum : uint8_t { kOpen, kClosing, kClosed };
  std::atomic<uint8_t> phase_{kOpen};
};

using RegionRef = Ref<Region>;

// The progress holder accesses a region on behalf of a peer: close() and revoke() wait for the end of it, which comes
// soon after is_over().
class RegionUse {
 public:
  RegionUse() = default;  // none
  // None unless the region is open under that id.
  RegionUse(RegionRef region, uint64_t id);
  RegionUse(RegionUse&& other) noexcept : region_(std::move(other.region_)), id_(other.id_) {}
  RegionUse& operator=(RegionUse&& other) noexcept;
  ~RegionUse() { reset(); }

  explicit operator bool() const { return static_cast<bool>(region_); }
  const Region* operator->() const { return region_.get(); }
  // Peers are refused by now.
  bool is_over() const { return !region_->is_open_as(id_); }

 private:
  void reset();
  RegionRef region_;
  uint64_t id_ = 0;
};

// Memory of a peer, resolved once from its descriptor.
class RemoteRegion : public RefCounted<RemoteRegion> {
 public:
  const RegionDescriptor& descriptor() const { return descriptor_; }
  uint64_t length_bytes() const { return descriptor_.length_bytes; }
  Peer* peer() const { return peer_.get(); }

 private:
  friend class Engine;
  friend class EngineCore;
  friend class PeerTable;
  friend class RefCounted<RemoteRegion>;
  RemoteRegion(Ref<Peer> peer, RegionDescriptor descriptor);
  ~RemoteRegion();
  const Ref<Peer> peer_;
  const RegionDescriptor descriptor_;
  std::unique_ptr<RemoteKey> key_;  // the transport's half; progress holder only
};

using RemoteRegionRef = Ref<RemoteRegion>;

}  // namespace crossrail
