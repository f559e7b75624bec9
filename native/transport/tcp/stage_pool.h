// Host memory through which payloads of GPUs go.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "device/copier.h"

namespace crossrail::tcp {

// Pinned host memory for payloads of GPUs. The driver may pin memory only once running kernels have ended (if a thread
// of the user's waits for them in a copy), and always unpins it only then (measured on an H100, driver 580). Such a
// kernel may be waiting for what the worker is about to do. So stages are pinned by the thread that registers GPU
// memory, and kept; the worker never asks for more. Threads: any.
class StagePool {
 public:
  static constexpr size_t kStageBytes = size_t{1} << 20;
  static constexpr size_t kStages = 16;  // a batch takes one or two: more of them under way at once take slower memory

  // The first call makes the stages, and others wait for it. gpu: whose driver pins them.
  void prepare(int gpu);
  // One that nobody has, a pinned one if there is any; where there is none, new memory, which is not pinned.
  std::unique_ptr<device::HostBuffer> take();
  // Those that are not pinned, as where the limit of locked memory (ulimit -l) forbids it, are kept too, but not more
  // than that.
  void give(std::unique_ptr<device::HostBuffer> stage);
  // For tests: of those that nobody has.
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
