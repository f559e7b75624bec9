// Regions of one engine: which memory is open to peers, under which id.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/ipc.h"
#include "transport/shm/layout.h"
#include "transport/transport.h"
#include "util/memory_map.h"

namespace crossrail::shm {

class RegionTable;

// Lifecycle: 1. open: id in the home segment. 2. revoked: id removed from it, peers refused. 3. destroyed: the engine
// may use the slot again, under a new generation.
class ShmRegion final : public LocalRegion {
 public:
  ShmRegion(RegionTable* table, Access access) : access(access), table_(table) {}
  ~ShmRegion() override;

  const Access access;
  std::shared_ptr<MemoryMap> map;  // null: the process's private memory
  uint64_t map_offset = 0;
  device::SharedRange shared;  // of GPU memory

 private:
  RegionTable* const table_;
};

// What a peer is told about a region.
struct RegionFacts {
  Status status = Status::kRegionClosed;  // kDone: open
  Access access = Access::kLocal;
  uint64_t base = 0;  // its address in the owner
  uint64_t length_bytes = 0;
  std::shared_ptr<MemoryMap> map;
  uint64_t map_offset = 0;
  bool is_gpu = false;         // memory that no CPU can access
  device::SharedRange shared;  // of GPU memory: how GPUs of other processes reach it
};

// Threads: any, except find(): progress holder.
class RegionTable {
 public:
  // sink: asked why a region is not open. Outlives the table.
  explicit RegionTable(Sink* sink);

  // What peers see of it, an OpenRegions.
  MemoryMap& seen_by_peers() const { return *open_map_; }

  std::unique_ptr<ShmRegion> add(uint64_t id, std::byte* base, uint64_t length_bytes, Access access, int gpu = -1,
                                 device::SharedRange shared = {});
  std::unique_ptr<ShmRegion> allocate(uint64_t id, uint64_t length_bytes, bool populate);
  // The status that peers which name it get from now on.
  Status revoke(const ShmRegion& region);
  void revoke_all();
  RegionFacts facts(uint64_t region_id);
  // For tests: number of engine-owned mappings, including those that are gone and not swept yet.
  size_t maps_known() {
    std::lock_guard lock(mutex_);
    return maps_.size();
  }

  // The open region with this id, or null. The caller holds `executing` = id, so that it stays valid (see
  // ShmTransport::is_region_quiet).
  struct Target {
    std::atomic<uint64_t> id;  // as in the home segment, which peers could overwrite; 0: none
    std::byte* base;
    uint64_t length_bytes;
    Access access;
    int gpu;  // as LocalRegion::gpu
  };
  const Target* find(uint64_t region_id) const;

  // --- who touches regions directly: the initiators of links to us. Listed from before they learn that they are
  // welcome, so that nobody touches a region unseen ---
  // process: its pidfd, none where the kernel gives none.
  void add_toucher(uint64_t link_id, std::string name, std::shared_ptr<MemoryMap> segment, Fd process);
  // The link is over on our side. Its initiator may not know that, continue to access our memory, and be stopped in the
  // middle: it stays listed until it has given up the link or died. If nobody would tell us of its end, it is not kept.
  void drop_toucher(uint64_t link_id);
  // Drops those that touch nothing any more. True: some may still do, ask again.
  bool forget_gone();
  // At the end: those that are accessing some region stay, until they have let go of it or died.
  void drop_idle_touchers();
  // Whether one of them is accessing this region now, or, for 0, any region.
  bool is_touched(uint64_t region_id);
  std::vector<std::string> touchers_of(uint64_t region_id);

  // The region that the progress holder copies into or out of on behalf of a peer, or 0. Same protocol as
  // LinkSegment::hazard: store the id, then check whether the region is still open; revoke, then check this.
  std::atomic<uint64_t> executing{0};

 private:
  friend class ShmRegion;
  Status withdraw(uint64_t region_id);

  const std::shared_ptr<MemoryMap> open_map_;
  OpenRegions* const seen_;  // in it
  Sink* const sink_;
  std::mutex mutex_;
  std::map<uint64_t, const ShmRegion*> open_;  // by id
  struct Toucher {
    std::string name;
    std::shared_ptr<MemoryMap> segment;
    Fd process;
    bool is_dropped = false;
    // Whether it is accessing this region, or, for 0, any region.
    bool is_at(uint64_t region_id) const;
    bool is_dead() const;
    // Touches nothing any more, as far as can be known.
    bool is_gone() const;
  };
  std::map<uint64_t, Toucher> touchers_;                 // by the link's id
  std::map<std::byte*, std::weak_ptr<MemoryMap>> maps_;  // engine-owned memory by address
  size_t maps_sweep_at_ = 1;                             // entries, including those of memory that is gone
  struct Deleter {
    void operator()(Target* targets) const;
  };
  std::unique_ptr<Target[], Deleter> targets_;  // by slot; written before the id is, read after it was seen
};

}  // namespace crossrail::shm
