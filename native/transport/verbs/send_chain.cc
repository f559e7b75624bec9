#include "transport/verbs/send_chain.h"

#include <arpa/inet.h>

#include "transport/verbs/adapter.h"

namespace crossrail::verbs {

SendChain::SendChain() {
  for (uint32_t i = 0; i < kChainMax; ++i) {
    requests_[i].sg_list = &entries_[i];
    requests_[i].next = i + 1 < kChainMax ? &requests_[i + 1] : nullptr;
  }
}

void SendChain::fill(uint32_t at, const rdma::NicWork& work, uint64_t id, bool is_signalled,
                     uint32_t inline_bytes_max) {
  ibv_send_wr& request = requests_[at];
  request.wr_id = id;
  request.send_flags = is_signalled ? unsigned{IBV_SEND_SIGNALED} : 0;
  request.num_sge = work.length_bytes > 0 ? 1 : 0;
  if (work.length_bytes > 0) {
    entries_[at] = {reinterpret_cast<uint64_t>(work.local), static_cast<uint32_t>(work.length_bytes),
                    static_cast<const VerbsRegistration*>(work.registration)->local_key()};
    // Inline data is read by the CPU, which cannot read GPU memory.
    if (work.op == rdma::NicOp::kWrite && work.length_bytes <= inline_bytes_max && !work.registration->is_gpu)
      request.send_flags |= IBV_SEND_INLINE;
  }
  request.wr.rdma.remote_addr = work.has_remote ? work.remote_address : 0;
  request.wr.rdma.rkey = work.has_remote ? static_cast<uint32_t>(work.remote_key) : 0;
  switch (work.op) {
    case rdma::NicOp::kRead:
      request.opcode = IBV_WR_RDMA_READ;
      break;
    case rdma::NicOp::kWrite:
      request.opcode = work.has_imm ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
      request.imm_data = htonl(work.imm);
      break;
  }
}

uint32_t SendChain::post(ibv_qp* queue_pair, uint32_t count, int* error) {
  ibv_send_wr& last = requests_[count - 1];
  ibv_send_wr* const after = last.next;
  last.next = nullptr;
  ibv_send_wr* refused = nullptr;
  *error = ibv_post_send(queue_pair, requests_.data(), &refused);
  last.next = after;
  if (*error == 0) return count;
  return refused == nullptr ? 0 : static_cast<uint32_t>(refused - requests_.data());
}

}  // namespace crossrail::verbs
