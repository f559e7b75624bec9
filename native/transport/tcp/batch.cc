#include "transport/tcp/batch.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "util/copy.h"
#include "util/errors.h"
#include "util/readable.h"

namespace crossrail::tcp {

// --- batches ---

void TxBatch::copy(const void* data, size_t size) {
  if (size == 0) return;  // such an entry may have no address
  CROSSRAIL_ASSERT(size <= kBytes - copied_bytes_);
  std::byte* const begin = bytes_.get() + std::exchange(copied_bytes_, copied_bytes_ + size);
  std::memcpy(begin, data, size);
  pending_bytes_ += size;
  if (!empty()) {
    iovec& last = views_.back();
    if (static_cast<std::byte*>(last.iov_base) + last.iov_len == begin) {
      last.iov_len += size;
      return;
    }
  }
  views_.push_back({begin, size});
}

void TxBatch::view(const std::byte* data, size_t size) {
  if (size == 0) return;
  views_.push_back({const_cast<std::byte*>(data), size});
  pending_bytes_ += size;
}

std::byte* TxBatch::stage(size_t size) {
  CROSSRAIL_ASSERT(size <= StagePool::kStageBytes);
  if (stages_.empty() || staged_bytes_ + size > StagePool::kStageBytes) {
    stages_.push_back(stage_pool_->take());
    staged_bytes_ = 0;
  }
  return stages_.back()->base() + std::exchange(staged_bytes_, staged_bytes_ + size);
}

void TxBatch::clear() {
  for (std::unique_ptr<device::HostBuffer>& stage : stages_) stage_pool_->give(std::move(stage));
  stages_.clear();
  copied_bytes_ = 0;
  views_.clear();
  detached_.clear();
  first_ = 0;
  pending_bytes_ = sent_bytes_ = 0;
  marks_.clear();
}

void TxBatch::sent(size_t size) {
  pending_bytes_ -= size;
  sent_bytes_ += size;
  while (size > 0) {
    iovec& view = views_[first_];
    const size_t taken = std::min(size, view.iov_len);
    view.iov_base = static_cast<std::byte*>(view.iov_base) + taken;
    view.iov_len -= taken;
    size -= taken;
    if (view.iov_len == 0) ++first_;
  }
}

void TxBatch::detach(const std::byte* base, uint64_t length_bytes) {
  for (iovec& view : views()) {
    const auto* data = static_cast<const std::byte*>(view.iov_base);
    if (data >= base && data < base + length_bytes) detach(view);
  }
}

void TxBatch::detach(iovec& view) {
  detached_.push_back(std::make_unique<std::byte[]>(view.iov_len));
  std::memcpy(detached_.back().get(), view.iov_base, view.iov_len);
  view.iov_base = detached_.back().get();
}

void TxBatch::detach_all() {
  marks_.clear();
  const std::byte* const own = bytes_.get();
  for (iovec& view : views()) {
    const auto* data = static_cast<const std::byte*>(view.iov_base);
    if (data < own || data >= own + kBytes) detach(view);
  }
}

uint64_t TxBatch::first_unsent() const {
  const auto unsent = std::ranges::find_if(marks_, [this](const Mark& mark) { return mark.end_bytes > sent_bytes_; });
  return unsent == marks_.end() ? kAllSent : unsent->first_operation;
}

// --- placement ---

void Placement::add(std::byte* base, uint64_t length) {
  if (length == 0) return;
  bytes_left += length;
  if (!targets.empty() && !maps_file) {
    iovec& last = targets.back();
    auto* const end = static_cast<std::byte*>(last.iov_base) + last.iov_len;
    if ((base == nullptr && last.iov_base == nullptr) || (last.iov_base != nullptr && end == base)) {
      last.iov_len += length;
      return;
    }
  }
  targets.push_back({base, length});
}

void Placement::placed(uint64_t size) {
  bytes_left -= size;
  while (size > 0) {
    iovec& target = targets[at];
    const uint64_t taken = std::min<uint64_t>(size, target.iov_len);
    if (target.iov_base != nullptr) target.iov_base = static_cast<std::byte*>(target.iov_base) + taken;
    target.iov_len -= taken;
    size -= taken;
    if (target.iov_len == 0) ++at;
  }
}

uint64_t Placement::copy_in(const std::byte* data, uint64_t size) {
  uint64_t copied = 0;
  while (copied < size) {
    iovec& target = targets[at];
    const uint64_t taken = std::min<uint64_t>(size - copied, target.iov_len);
    if (target.iov_base != nullptr) {
      auto* const to = static_cast<std::byte*>(target.iov_base);
      if (gpu >= 0) {
        copier->begin(gpu, to, data + copied, taken);
      } else if (!maps_file) {
        copy_cached(to, data + copied, taken);
      } else if (!copy_to_file(to, data + copied, taken)) {
        break;
      }
      target.iov_base = to + taken;
    }
    target.iov_len -= taken;
    copied += taken;
    if (target.iov_len == 0) ++at;
  }
  bytes_left -= copied;
  if (gpu >= 0 && !copier->finish()) failed = true;
  return copied;
}

bool Placement::skip_unwritable() {
  bool any_left = false;
  bool any_gone = false;
  for (size_t i = at; i < targets.size(); ++i) {
    iovec& target = targets[i];
    if (target.iov_base == nullptr) continue;
    any_left = true;
    if (is_readable(static_cast<std::byte*>(target.iov_base), target.iov_len)) continue;
    target.iov_base = nullptr;
    any_gone = true;
  }
  if (!any_gone) discard_all();
  failed = failed || any_left;
  return any_left;
}

void Placement::discard_all() {
  for (size_t i = at; i < targets.size(); ++i) targets[i].iov_base = nullptr;
}

void Placement::discard_range(const std::byte* base, uint64_t length_bytes) {
  for (size_t i = at; i < targets.size(); ++i) {
    const auto* target = static_cast<const std::byte*>(targets[i].iov_base);
    if (target >= base && target < base + length_bytes) targets[i].iov_base = nullptr;
  }
}

}  // namespace crossrail::tcp
