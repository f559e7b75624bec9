// A kernel that adds to a 64-bit word of the host, launched on a stream of the user's, and so captured with that stream
// into a CUDA graph: how a GPU tells the CPU how far it is.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "device/cuda.h"

namespace crossrail::device {

// Adds to the words of one block of the host's memory.
// Lifecycle: 1. made; nothing of CUDA happens. 2. the first add() pins the block for all GPUs, and loads the kernel
// into the stream's GPU unless it is there, where it stays. 3. gone, and the block unpinned: no kernel that adds to it
// may be under way then, and no graph that has one may be launched any more.
// Threads: any.
class WordAdder {
 public:
  // base: on a page; whole pages.
  WordAdder(void* base, size_t bytes) : base_(base), bytes_(bytes) {}
  ~WordAdder();
  WordAdder(const WordAdder&) = delete;
  WordAdder& operator=(const WordAdder&) = delete;

  // Launches it behind what that stream has been given, and returns. Once all of that has ended it adds, and whoever
  // then reads the word with acquire sees what that wrote. With respect to other kernels of that GPU it is atomic; to
  // the CPU and other GPUs only where the link between them has atomics, which PCIe may not have: one of them at a time
  // adds.
  // stream: a cudaStream_t, alive, of the context that torch and CUDA's runtime use. gpu: whose it is; -1: the driver
  // is asked, and a default stream is the thread's current GPU's.
  // Throws UsageError for a GPU that is not there, or a stream of another context; TransportError where the driver is
  // missing or refuses, or the GPU is too old. Nothing was launched then.
  void add(std::atomic<uint64_t>* word, uint64_t delta, uint64_t stream, int gpu);

 private:
  uint64_t address_of(const Driver& driver, std::atomic<uint64_t>* word);

  void* const base_;
  const size_t bytes_;
  std::mutex mutex_;                       // guards what follows
  const Driver* pinned_driver_ = nullptr;  // null: not pinned
  int pinned_gpu_ = -1;                    // whose context asked for it; it holds for all
};

}  // namespace crossrail::device
