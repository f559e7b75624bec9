// Work requests ready to be filled in: the fields that are the same for all are written once, and they are linked.
#pragma once

#include <array>
#include <cstdint>

#include "transport/rdma/nic.h"
#include "transport/verbs/library.h"
#include "transport/verbs/queues.h"

namespace crossrail::verbs {

// Progress holder. One per NIC, used by one post() at a time.
class SendChain {
 public:
  SendChain();

  // Writes `work` into place `at` of the chain.
  void fill(uint32_t at, const rdma::NicWork& work, uint64_t id, bool is_signalled, uint32_t inline_bytes_max);
  // Posts the first `count`; returns how many were accepted, and the error if not all were.
  uint32_t post(ibv_qp* queue_pair, uint32_t count, int* error);

 private:
  std::array<ibv_send_wr, kChainMax> requests_{};
  std::array<ibv_sge, kChainMax> entries_{};
};

}  // namespace crossrail::verbs
