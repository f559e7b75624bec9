// Kernels that change a 64-bit word in host memory, or wait for one, launched on a user's stream, and so captured with
// that stream into a CUDA graph: how a GPU tells the CPU how far it has got, and learns how far others are.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>

#include "device/cuda.h"

namespace crossrail::device {

struct Kernels;

// Counts that the CPU gives to waiting kernels, each part on its own cache line. One kernel waits at a time.
struct CountWords {
  static constexpr uint64_t kEnded = uint64_t{1} << 63;
  alignas(64) std::atomic<uint64_t> given{0};  // so far; with kEnded: no more will follow
  // Written by kernels. taken: consumed by successful waits. missed: 0, or how many the first unsuccessful wait wanted,
  // with kEnded if no more will be given. Later kernels do not wait until the CPU has stored 0.
  alignas(64) std::atomic<uint64_t> taken{0};
  std::atomic<uint64_t> missed{0};
};
static_assert(sizeof(CountWords) == 128);

// The words in one block of host memory.
// Lifecycle: 1. constructed; no CUDA call happens. 2. the first launch pins the block for all GPUs, and loads the
// kernels into the stream's GPU, where they stay. 3. destroyed, and the block unpinned: no kernel that uses a word of
// it may be running then, and no graph that contains one may be launched any more.
// Threads: any.
// A launch is enqueued after the stream's earlier work, and returns at once. stream: a valid cudaStream_t, in the
// context that torch and CUDA's runtime use. gpu: the stream's; -1: the driver is asked, and a default stream belongs
// to the thread's current GPU. Launches throw UsageError for a GPU that does not exist, or a stream of another context;
// TransportError if the driver is missing or refuses, or the GPU is too old. In these cases nothing was launched.
class HostWords {
 public:
  // base: on a page boundary; whole pages.
  HostWords(void* base, size_t bytes) : base_(base), bytes_(bytes) {}
  ~HostWords();
  HostWords(const HostWords&) = delete;
  HostWords& operator=(const HostWords&) = delete;

  // Adds once the stream's earlier work has ended; whoever then reads the word with acquire sees what that work wrote.
  // Atomic with respect to other kernels of that GPU; with respect to the CPU and other GPUs only if the link between
  // them has atomics, which PCIe may lack: then only one of them may add at a time.
  void add(std::atomic<uint64_t>* word, uint64_t delta, uint64_t stream, int gpu);

  // Holds the stream's later work back until `count` counts are available that no wait has consumed, and consumes them:
  // what was stored before they were given is visible. It also ends when no more will be given, or after timeout_ns,
  // and then reports that in missed.
  void await_counts(CountWords* words, uint64_t count, uint64_t timeout_ns, uint64_t stream, int gpu);

  // The word's address for that GPU's kernels.
  uint64_t address_on(int gpu, const void* word);

 private:
  // numbers: the kernel's arguments after the word's address, which comes first.
  void launch(void* Kernels::* kernel, void* word, std::span<uint64_t> numbers, uint64_t stream, int gpu);
  void pin(const Driver& driver, int gpu);

  void* const base_;
  const size_t bytes_;
  std::mutex mutex_;                       // guards what follows
  const Driver* pinned_driver_ = nullptr;  // null: not pinned
  int pinned_gpu_ = -1;                    // the one whose context pinned it; valid for all
};

}  // namespace crossrail::device
