// Receives that peers use up: zero-length ones by immediates, slots by fragments. Shared by all paths of a NIC.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "transport/verbs/queues.h"
#include "transport/verbs/slots.h"

namespace crossrail::verbs {

// Progress holder. Two queues, since a receive is used up by whatever arrives next: an immediate must not use up a
// fragment's slot.
class Receives {
 public:
  explicit Receives(const Adapter& adapter);  // throws TransportError

  ibv_srq* imm_queue() const { return imms_.get(); }
  ibv_srq* fragment_queue() const { return fragments_.get(); }
  bool owns(const ibv_srq* queue) const { return queue == imms_.get() || queue == fragments_.get(); }
  void used_imm() { ++imms_missing_; }
  void used_fragment(uint32_t slot) { slots_missing_.push_back(slot); }
  std::span<const uint8_t> fragment(uint32_t slot, uint32_t length_bytes) { return {slots_.at(slot), length_bytes}; }
  // Of a device in software, when a path has ended. Soft-RoCE (since Linux 6.4) forgets the receive of a fragment that
  // was arriving then, and says so to nobody. A spare one takes its place: the queue has room for it where one was
  // lost, and until it is full by the device's rounding. Then the spare waits.
  void make_up_for_path();
  // Posts what was used up. Whatever the NIC does not accept now is retried by the next call; meanwhile peers wait, and
  // their NICs retry indefinitely.
  void replenish() {
    if (imms_missing_ > 0) replenish_imms();
    if (!slots_missing_.empty()) replenish_fragments();
  }

 private:
  void replenish_imms();
  void replenish_fragments();

  Slots slots_;
  ReceiveQueue imms_;
  ReceiveQueue fragments_;
  uint32_t imms_missing_ = 0;
  std::vector<uint32_t> slots_missing_;
  std::array<ibv_recv_wr, kReplenishChain> imm_chain_{};
};

}  // namespace crossrail::verbs
