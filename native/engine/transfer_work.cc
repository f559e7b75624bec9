#include "engine/transfer_work.h"

namespace crossrail {

void TransferWork::recycle() {
  remote = nullptr;
  if (receiver) receiver = nullptr;
  bulk = false;
  imm = kNoImm;
  rail = kAnyRail;
  local_offset = remote_offset = length_bytes = 0;
  page_count = page_bytes = local_stride_bytes = remote_stride_bytes = 0;
  if (page_capacity > kPagesKept) {
    local_pages.reset();
    remote_pages.reset();
    page_capacity = 0;
  }
  payload.clear();
  pieces = 1;
  first_rail = piece = 0;
  slice_offset = page = 0;
  open_items = posted = retired = 0;
  cut_short = started = false;
  targets_total = 0;
  bytes_retired = 0;
  failure = Status::kDone;
  if (!failed_peer.empty()) failed_peer.clear();
  if (!detail.empty()) detail.clear();
}

}  // namespace crossrail
