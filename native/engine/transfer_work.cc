#include "engine/transfer_work.h"

#include <utility>

namespace crossrail {

void TransferWork::recycle() {
  if (failure != Status::kDone) {
    failed_peer.reset();
    detail.clear();
  }
  switch (kind) {
    case OpKind::kWrite:
    case OpKind::kRead:
      break;
    case OpKind::kPagedWrites:
      page = 0;
      if (page_capacity > kPagesKept) take_storage();
      note_storage();
      break;
    case OpKind::kScatter:
    case OpKind::kBarrier:
      targets_total = 0;
      group = nullptr;
      break;
    case OpKind::kSend:
    case OpKind::kService:
      payload.clear();
      note_storage();
      receiver = nullptr;
      break;
  }
  failure = Status::kDone;
  if (cut_short || resumed) kept_bytes.clear();
  bulk = cut_short = resumed = false;
  if (std::exchange(has_plan, false)) verify.reset();
  if (std::exchange(has_trigger, false)) {
    triggered_ns.store(kNoTrigger, std::memory_order_relaxed);
    ended_ns = kNoTrigger;
    trigger = nullptr;
  }
  local = nullptr;  // of a transfer that was filled in but never handed over
  imm = kNoImm;
  rail = kAnyRail;
  open_items = posted = retired = 0;
  length_bytes = 0;
  bytes_retired.store(0, std::memory_order_relaxed);  // nobody else has access now
  pieces = 0;
  piece = 0;
  slice_offset = 0;
}

void TransferWork::note_storage() { storage_bytes = page_capacity * 2 * sizeof(uint32_t) + payload.capacity(); }

TransferWork::Storage TransferWork::take_storage() {
  page_capacity = storage_bytes = 0;
  return {std::move(local_pages), std::move(remote_pages), std::exchange(payload, {})};
}

}  // namespace crossrail
