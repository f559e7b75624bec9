#include "transport/tcp/stage_pool.h"

#include <utility>

namespace crossrail::tcp {

void StagePool::prepare(int gpu) {
  const std::lock_guard lock(preparing_);
  for (size_t i = 0; i < kStages && !is_prepared_; ++i) give(std::make_unique<device::HostBuffer>(kStageBytes, gpu));
  is_prepared_ = true;
}

std::unique_ptr<device::HostBuffer> StagePool::take() {
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      std::unique_ptr<device::HostBuffer> stage = std::move(free_.back());
      free_.pop_back();
      return stage;
    }
  }
  return std::make_unique<device::HostBuffer>(kStageBytes);
}

void StagePool::give(std::unique_ptr<device::HostBuffer> stage) {
  const std::lock_guard lock(mutex_);
  if (stage->is_pinned()) {
    free_.push_back(std::move(stage));
  } else if (free_.size() < kStages) {
    free_.insert(free_.begin(), std::move(stage));  // used when no pinned one is left
  }
}

}  // namespace crossrail::tcp
