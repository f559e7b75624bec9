// Registered memory in equal slots: the buffers of fragments and datagrams.
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

  // Throws TransportError, like grow().
  Slots(const Adapter& adapter, uint32_t count, uint32_t slot_bytes)
      : slot_bytes_(slot_bytes), block_slots_(count), adapter_(adapter) {
    grow();
  }

  // Adds as many as there were initially.
  void grow() {
    const size_t bytes = size_t{block_slots_} * slot_bytes_;
    Block block{make_pages(bytes), nullptr};
    block.memory = register_with(adapter_, block.bytes.get(), bytes, Access::kLocal);
    const auto first = static_cast<uint32_t>(blocks_.size()) * block_slots_;
    blocks_.push_back(std::move(block));
    free_.reserve(first + block_slots_);
    for (uint32_t slot = block_slots_; slot > 0; --slot) free_.push_back(first + slot - 1);
  }

  // kNone: all are in use.
  uint32_t take() {
    if (free_.empty()) return kNone;
    const uint32_t slot = free_.back();
    free_.pop_back();
    return slot;
  }
  void give_back(uint32_t slot) { free_.push_back(slot); }

  uint8_t* at(uint32_t slot) {
    return reinterpret_cast<uint8_t*>(blocks_[slot / block_slots_].bytes.get()) +
           size_t{slot % block_slots_} * slot_bytes_;
  }
  uint32_t slot_bytes() const { return slot_bytes_; }
  // The first `length` bytes of a slot.
  ibv_sge entry(uint32_t slot, uint32_t length) {
    return {reinterpret_cast<uint64_t>(at(slot)), length, blocks_[slot / block_slots_].memory->lkey};
  }

 private:
  struct Block {
    Pages bytes;  // destroyed after the memory
    Memory memory;
  };
  const uint32_t slot_bytes_;
  const uint32_t block_slots_;
  const Adapter& adapter_;
  std::vector<Block> blocks_;
  std::vector<uint32_t> free_;
};

}  // namespace crossrail::verbs
