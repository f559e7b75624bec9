// Ids of this engine's regions.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "transport/types.h"

namespace crossrail {

// Invariant: no id is drawn twice; ids that are drawn and not given back have different slots (region_slot).
// Threads: any.
class RegionIds {
 public:
  // Throws TransportError when all slots are taken.
  uint64_t draw();
  // Nobody uses the slot any more: every transport's half of the region is destroyed. Allocates nothing.
  void give_back(uint64_t region_id);

 private:
  std::mutex mutex_;
  std::vector<uint32_t> free_slots_;  // last in, first out: slots in use stay few and near
  uint32_t next_slot_ = 0;
  uint64_t next_generation_ = 1;
};

}  // namespace crossrail
