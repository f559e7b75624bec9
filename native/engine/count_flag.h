// Counts that kernels of a GPU wait for.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "device/host_words.h"
#include "util/ref.h"

namespace crossrail {

// Words in host memory through which a counter (ImmCounter::raise) gives its counts to kernels: as credits, like those
// that its own waits take. It must stay alive until kernels that wait on it have run, and as long as a graph that
// contains one may be launched. Threads: give() and end() with the counter's lock held; everything else from any
// thread.
// Invariant: nothing is given after end().
class CountFlag : public RefCounted<CountFlag> {
 public:
  // in_real_time: the engine is not simulated.
  explicit CountFlag(bool in_real_time);

  void give(uint64_t counts);
  // No more will be given: kernels that wait for more end, and say so.
  void end();

  uint64_t given() const;
  uint64_t taken() const;  // by kernels
  bool has_ended() const;
  // After end(), once: what was given and no kernel has taken, which none will. The caller's then.
  uint64_t take_back();

  // As HostWords::await_counts; count > 0. UsageError in a simulated engine.
  void wait_on(uint64_t stream, int gpu, uint64_t count, uint64_t timeout_ns);
  // Whether a kernel has ended without its counts, since this was asked last: how many it wanted, and whether no more
  // come. For a CPU that has waited for the kernels' streams. 0: none has.
  struct Missed {
    uint64_t wanted;
    bool has_ended;
  };
  Missed take_missed();

  // Of the word that says how many were given, and, in its highest bit, that no more will be; 64-byte aligned.
  uint64_t address() const { return reinterpret_cast<uint64_t>(&words_->given); }
  uint64_t address_on(int gpu);

 private:
  struct Unmap {
    void operator()(device::CountWords* words) const;
  };
  const bool in_real_time_;
  const std::unique_ptr<device::CountWords, Unmap> words_;  // a page
  std::atomic<uint64_t> taken_max_{~uint64_t{0}};           // by kernels; what the word has beyond, take_back() took
  device::HostWords for_gpus_;
};

}  // namespace crossrail
