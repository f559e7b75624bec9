#include "engine/region_ids.h"

#include <string>

#include "util/errors.h"

namespace crossrail {

uint64_t RegionIds::draw() {
  std::lock_guard lock(mutex_);
  uint32_t slot;
  if (!free_slots_.empty()) {
    slot = free_slots_.back();
    free_slots_.pop_back();
  } else if (next_slot_ < kRegionSlots) {
    // Room for all that can come back: give_back() is called by destructors, which must not run out of memory.
    if (free_slots_.capacity() <= next_slot_) free_slots_.reserve(2 * size_t{next_slot_} + 16);
    slot = next_slot_++;
  } else {
    throw TransportError("register", 0, "all " + std::to_string(kRegionSlots) + " region slots of the engine are taken",
                         "register larger regions, or close some");
  }
  return next_generation_++ << kRegionSlotBits | slot;
}

void RegionIds::give_back(uint64_t region_id) {
  std::lock_guard lock(mutex_);
  free_slots_.push_back(region_slot(region_id));
}

}  // namespace crossrail
