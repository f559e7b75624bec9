// Kernels that change a 64-bit word of the host, or wait for one, launched on a stream of the user's, and so captured
// with that stream into a CUDA graph: how a GPU tells the CPU how far it is, and learns how far others are.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>

#include "device/cuda.h"

namespace crossrail::device {

struct Kernels;

// Counts that the CPU gives to kernels that wait, each part on a line of its own. One kernel waits at a time.
struct CountWords {
  static constexpr uint64_t kEnded = uint64_t{1} << 63;
  alignas(64) std::atomic<uint64_t> given{0};  // so far; kEnded: and no more will be
  // Of kernels. taken: by waits that ended well. missed: 0; else how many the first wanted that did not, with kEnded
  // because no more will be given. Those behind it do not wait, until the CPU has stored 0.
  alignas(64) std::atomic<uint64_t> taken{0};
  std::atomic<uint64_t> missed{0};
};
static_assert(sizeof(CountWords) == 128);

// The words of one block of the host's memory.
// Lifecycle: 1. made; nothing of CUDA happens. 2. the first launch pins the block for all GPUs, and loads the kernels
// into the stream's GPU unless they are there, where they stay. 3. gone, and the block unpinned: no kernel that has a
// word of it may be under way then, and no graph that has one may be launched any more.
// Threads: any.
// A launch comes behind what the stream has been given, and returns. stream: a cudaStream_t, alive, of the context that
// torch and CUDA's runtime use. gpu: whose it is; -1: the driver is asked, and a default stream is the thread's current
// GPU's. Launches throw UsageError for a GPU that is not there, or a stream of another context; TransportError where
// the driver is missing or refuses, or the GPU is too old. Nothing was launched then.
class HostWords {
 public:
  // base: on a page; whole pages.
  HostWords(void* base, size_t bytes) : base_(base), bytes_(bytes) {}
  ~HostWords();
  HostWords(const HostWords&) = delete;
  HostWords& operator=(const HostWords&) = delete;

  // Once all that the stream was given before has ended it adds, and whoever then reads the word with acquire sees what
  // that wrote. With respect to other kernels of that GPU it is atomic; to the CPU and other GPUs only where the link
  // between them has atomics, which PCIe may not have: one of them at a time adds.
  void add(std::atomic<uint64_t>* word, uint64_t delta, uint64_t stream, int gpu);

  // Keeps what the stream is given afterwards until `count` counts are there that no wait has taken, and takes them:
  // what was stored before they were given is seen. Or until no more are given, or for timeout_ns: then it says so in
  // missed.
  void await_counts(CountWords* words, uint64_t count, uint64_t timeout_ns, uint64_t stream, int gpu);

  // As that GPU's kernels know the word.
  uint64_t address_on(int gpu, const void* word);

 private:
  // numbers: what the kernel takes besides the word's address, which comes first.
  void launch(void* Kernels::* kernel, void* word, std::span<uint64_t> numbers, uint64_t stream, int gpu);
  void pin(const Driver& driver, int gpu);

  void* const base_;
  const size_t bytes_;
  std::mutex mutex_;                       // guards what follows
  const Driver* pinned_driver_ = nullptr;  // null: not pinned
  int pinned_gpu_ = -1;                    // whose context asked for it; it holds for all
};

}  // namespace crossrail::device
