// Host memory through which GPU payloads travel.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "device/copier.h"

namespace crossrail::tcp {

// Pinned host memory for GPU payloads. The driver may be unable to pin memory before running kernels have ended (if a
// user thread waits for them in a copy), and never unpins it before that (measured on an H100, driver 580). Such a
// kernel may be waiting for what the worker is about to do. So stages are pinned by the thread that registers GPU
// memory, and kept; the worker never asks for more. Threads: any.
class StagePool {
 public:
  static constexpr size_t kStageBytes = size_t{1} << 20;
  static constexpr size_t kStages = 16;  // a batch takes one or two; batches beyond that use slower memory

  // The first call makes the stages; concurrent calls wait for it. gpu: the one whose driver pins them.
  void prepare(int gpu);
  // A free stage, pinned if possible; if none is free, new memory, which is not pinned.
  std::unique_ptr<device::HostBuffer> take();
  // Stages that are not pinned, for example because the limit of locked memory (ulimit -l) forbids it, are kept too,
  // but no more than kStages.
  void give(std::unique_ptr<device::HostBuffer> stage);
  // For tests: number of free stages.
  size_t kept() {
    const std::lock_guard lock(mutex_);
    return free_.size();
  }

 private:
  std::mutex preparing_;  // taken first; guards is_prepared_
  bool is_prepared_ = false;
  std::mutex mutex_;  // guards free_
  std::vector<std::unique_ptr<device::HostBuffer>> free_;
};

}  // namespace crossrail::tcp
