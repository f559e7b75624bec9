// Registered memory in equal slots: what fragments and datagrams are sent from and received into.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "transport/verbs/adapter.h"
#include "util/pages.h"

namespace crossrail::verbs {

// Progress holder.
class Slots {
 public:
  static constexpr uint32_t kNone = ~0u;

  Slots(const Adapter& adapter, uint32_t count, uint32_t slot_bytes)
      : slot_bytes_(slot_bytes), bytes_(make_pages(size_t{count} * slot_bytes)) {
    memory_ = register_with(adapter, bytes_.get(), size_t{count} * slot_bytes, Access::kLocal);
    free_.reserve(count);
    for (uint32_t slot = count; slot > 0; --slot) free_.push_back(slot - 1);
  }

  // kNone: all are in use.
  uint32_t take() {
    if (free_.empty()) return kNone;
    const uint32_t slot = free_.back();
    free_.pop_back();
    return slot;
  }
  void give_back(uint32_t slot) { free_.push_back(slot); }

  uint8_t* at(uint32_t slot) { return reinterpret_cast<uint8_t*>(bytes_.get()) + size_t{slot} * slot_bytes_; }
  uint32_t slot_bytes() const { return slot_bytes_; }
  // Of the first `length` bytes of a slot.
  ibv_sge entry(uint32_t slot, uint32_t length) {
    return {reinterpret_cast<uint64_t>(at(slot)), length, memory_->lkey};
  }

 private:
  uint32_t slot_bytes_;
  Pages bytes_;  // destroyed after memory_ below
  Memory memory_;
  std::vector<uint32_t> free_;
};

}  // namespace crossrail::verbs
