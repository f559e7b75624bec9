#include "transport/verbs/receives.h"

#include <algorithm>
#include <cerrno>

#include "util/errors.h"

namespace crossrail::verbs {

namespace {

ReceiveQueue make_queue(const Adapter& adapter, uint32_t depth, const char* what) {
  ibv_srq_init_attr wanted{};
  wanted.attr.max_wr = depth;
  wanted.attr.max_sge = 1;
  ReceiveQueue queue(library().create_srq(adapter.domain(), &wanted));
  if (queue == nullptr) fail(adapter, "ibv_create_srq", errno, std::string("cannot make the receive queue of ") + what);
  return queue;
}

}  // namespace

Receives::Receives(const Adapter& adapter)
    : slots_(adapter, kFragmentReceives, static_cast<uint32_t>(rdma::kFragmentBytesMax)),
      imms_(make_queue(adapter, std::min<uint32_t>(kImmReceives, static_cast<uint32_t>(adapter.limits().max_srq_wr)),
                       "immediates")),
      fragments_(make_queue(adapter, kFragmentReceives, "messages")) {
  for (ibv_recv_wr& request : imm_chain_) request.wr_id = tagged(Tag::kImmReceive, 0, 0);
  imms_missing_ = std::min<uint32_t>(kImmReceives, static_cast<uint32_t>(adapter.limits().max_srq_wr));
  for (uint32_t i = 0; i < kFragmentReceives; ++i) slots_missing_.push_back(slots_.take());
  replenish();
  if (imms_missing_ > 0 || !slots_missing_.empty()) fail(adapter, "ibv_post_srq_recv", ENOMEM, "cannot post receives");
}

void Receives::replenish_imms() {
  while (imms_missing_ > 0) {
    const uint32_t count = std::min(imms_missing_, kReplenishChain);
    for (uint32_t i = 0; i < count; ++i) imm_chain_[i].next = i + 1 < count ? &imm_chain_[i + 1] : nullptr;
    ibv_recv_wr* refused = nullptr;
    if (ibv_post_srq_recv(imms_.get(), imm_chain_.data(), &refused) == 0) {
      imms_missing_ -= count;
      continue;
    }
    if (refused != nullptr) imms_missing_ -= static_cast<uint32_t>(refused - imm_chain_.data());
    return;
  }
}

void Receives::make_up_for_path() {
  if (!slots_missing_.empty()) return;
  uint32_t slot = slots_.take();
  if (slot == Slots::kNone) {
    try {
      slots_.grow();
    } catch (const TransportError&) {  // a limit on locked memory: retried with the next one
      return;
    }
    slot = slots_.take();
  }
  slots_missing_.push_back(slot);
  replenish_fragments();
}

void Receives::replenish_fragments() {
  while (!slots_missing_.empty()) {
    ibv_sge entry = slots_.entry(slots_missing_.back(), slots_.slot_bytes());
    ibv_recv_wr request{};
    request.wr_id = tagged(Tag::kFragmentReceive, 0, slots_missing_.back());
    request.sg_list = &entry;
    request.num_sge = 1;
    ibv_recv_wr* refused = nullptr;
    if (ibv_post_srq_recv(fragments_.get(), &request, &refused) != 0) return;
    slots_missing_.pop_back();
  }
}

}  // namespace crossrail::verbs
