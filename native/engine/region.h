// Registered memory, ours and our peers'.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

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
// Owner of the memory: the caller, from registration until close() returned kReady; the engine for alloc().
// Threads: any.
class Region {
 public:
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  // relaxed: whoever adds a reference already holds one.
  void add_ref() { uses_.fetch_add(1, std::memory_order_relaxed); }
  void release() { drop(1); }

  std::byte* base() const { return base_; }
  uint64_t length_bytes() const { return length_bytes_; }
  Access access() const { return access_; }
  uint64_t id() const { return descriptor_.region_id; }
  // Engine-owned or shared memory: peers of this host can map it.
  bool is_mapped() const;
  const RegionDescriptor& descriptor() const { return descriptor_; }
  // Transfers of ours that read from (or, for reads, write to) it now.
  uint32_t inflight_ops() const { return static_cast<uint32_t>(uses_.load(std::memory_order_seq_cst) >> 32); }
  // seq_cst: pairs with close(), see begin_op.
  bool closed() const { return phase_.load(std::memory_order_seq_cst) != kOpen; }

  // Refuses new use and blocks until neither our worker nor a peer touches the memory. Idempotent. kTimeout: still in
  // use, and still refusing: call again.
  WaitResult close(Deadline deadline, const InterruptCheck& interrupted);
  const Clock& clock() const;  // that deadlines of close() are points on
  // The first half of close() without the wait.
  void begin_close();

 private:
  friend class Engine;
  friend class EngineCore;
  Region(Ref<Engine> engine, LocalRegions local, Access access);
  ~Region();
  // A transfer's use: a reference and an operation in flight, in one atomic. seq_cst: who begins and then looks at
  // closed(), and close(), which does the reverse: one sees the other.
  void begin_op() { uses_.fetch_add(kOneOp, std::memory_order_seq_cst); }
  // release: pairs with the acquire in inflight_ops(): close() sees our copies finished.
  void end_op() { drop(kOneOp); }
  void drop(uint64_t uses) {
    if (static_cast<uint32_t>(uses_.fetch_sub(uses, std::memory_order_acq_rel) - uses) == 0) delete this;
  }

  const Ref<Engine> engine_;  // the transports must outlive local_
  LocalRegions local_;        // the transports' halves
  std::byte* const base_;
  const uint64_t length_bytes_;
  const Access access_;
  RegionDescriptor descriptor_;
  // Low half: references. High half: operations in flight; each holds a reference too.
  static constexpr uint64_t kOneOp = (uint64_t{1} << 32) + 1;
  std::atomic<uint64_t> uses_{1};
  enum : uint8_t { kOpen, kClosing, kClosed };
  std::atomic<uint8_t> phase_{kOpen};
};

using RegionRef = Ref<Region>;

// Memory of a peer, resolved once from its descriptor.
class RemoteRegion : public RefCounted<RemoteRegion> {
 public:
  const RegionDescriptor& descriptor() const { return descriptor_; }
  uint64_t length_bytes() const { return descriptor_.length_bytes; }
  Peer* peer() const { return peer_.get(); }

 private:
  friend class Engine;
  friend class EngineCore;
  friend class RefCounted<RemoteRegion>;
  RemoteRegion(Ref<Peer> peer, RegionDescriptor descriptor);
  ~RemoteRegion();
  const Ref<Peer> peer_;
  const RegionDescriptor descriptor_;
  std::unique_ptr<RemoteKey> key_;  // the transport's half; progress holder only
};

using RemoteRegionRef = Ref<RemoteRegion>;

}  // namespace crossrail
