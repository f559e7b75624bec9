// Handles the completion queues, and reports to the layer.
#include <arpa/inet.h>

#include <utility>

#include "transport/verbs/verbs_nic.h"
#include "util/errors.h"

namespace crossrail::verbs {

namespace {

// Keeps a poll bounded, however fast new ones arrive.
constexpr uint32_t kBatchesPerPoll = 4;

}  // namespace

bool VerbsNic::refill(ibv_cq* queue, Batch* batch) {
  if (!batch->is_empty()) return false;
  const int count = ibv_poll_cq(queue, static_cast<int>(Batch::kMax), batch->entries.data());
  if (count < 0) {
    fatal_ = "its completion queue cannot be read";
    return false;
  }
  batch->next = 0;
  batch->count = static_cast<uint32_t>(count);
  if (count > 0) sleeper_.saw_completion();
  return batch->count < Batch::kMax;
}

uint32_t VerbsNic::take_receives(rdma::NicEvents& events) {
  uint32_t told = 0;
  for (uint32_t i = 0; i < kBatchesPerPoll; ++i) {
    const bool is_last = refill(receives_done_.get(), &receive_batch_);
    while (!receive_batch_.is_empty()) {
      on_receive(receive_batch_.entries[receive_batch_.next++], events);
      ++told;
      ++receives_passed_;
    }
    if (is_last) {
      receives_passed_ += kReceiveEntries;
      break;
    }
  }
  return told;
}

uint32_t VerbsNic::take_sends(rdma::NicEvents& events) {
  uint32_t told = 0;
  for (uint32_t i = 0; i < kBatchesPerPoll; ++i) {
    const bool is_last = refill(sends_.get(), &send_batch_);
    while (!send_batch_.is_empty()) {
      on_send(send_batch_.entries[send_batch_.next++], events);
      ++told;
    }
    if (is_last) {
      if (budget_owed_ != 0) ++told;  // those that were refused for lack of budget ask again
      budget_ += std::exchange(budget_owed_, 0);
      free_.insert(free_.end(), freed_.begin(), freed_.end());
      freed_.clear();
      break;
    }
  }
  return told;
}

// A completion of a queue pair that no longer exists is ignored; the receive that it used up is posted again.
void VerbsNic::on_receive(const ibv_wc& completion, rdma::NicEvents& events) {
  switch (tag_of(completion.wr_id)) {
    case Tag::kImmReceive: {
      receives_->used_imm();
      VerbsPath* path = path_by_queue_pair(completion.qp_num);
      if (path == nullptr || completion.status != IBV_WC_SUCCESS) return;
      if (completion.opcode == IBV_WC_RECV_RDMA_WITH_IMM) events.on_imm(path, ntohl(completion.imm_data));
      return;
    }
    case Tag::kFragmentReceive:
      return on_fragment(completion, events);
    case Tag::kDatagramReceive:
      return on_datagram(completion, events);
    case Tag::kWork:
    case Tag::kFragment:
    case Tag::kDatagram:
      break;
  }
  CROSSRAIL_ASSERT(!"a receive completion of what was sent");
}

void VerbsNic::on_fragment(const ibv_wc& completion, rdma::NicEvents& events) {
  const uint32_t slot = value_of(completion.wr_id);
  VerbsPath* path = path_by_queue_pair(completion.qp_num);
  if (path != nullptr && completion.status == IBV_WC_SUCCESS && completion.opcode == IBV_WC_RECV)
    events.on_fragment(path, receives_->fragment(slot, completion.byte_len));
  receives_->used_fragment(slot);
}

void VerbsNic::on_datagram(const ibv_wc& completion, rdma::NicEvents& events) {
  const std::span<const uint8_t> bytes = datagrams_->received(completion);
  if (!bytes.empty()) events.on_datagram(bytes);
  datagrams_->used(completion);
}

void VerbsNic::on_send(const ibv_wc& completion, rdma::NicEvents& events) {
  if (tag_of(completion.wr_id) == Tag::kDatagram) return datagrams_->on_sent(completion);
  VerbsPath* path = path_by_index(path_of(completion.wr_id));
  if (path == nullptr || path->works_ == nullptr) return;
  if (tag_of(completion.wr_id) == Tag::kWork) {
    if (completion.qp_num == path->works_->qp_num) path->on_work(completion, events);
  } else {
    if (completion.qp_num == path->messages_->qp_num) path->on_fragment_sent(completion, events);
  }
}

}  // namespace crossrail::verbs
