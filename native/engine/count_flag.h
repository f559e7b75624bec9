// Counts that GPU kernels wait for.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "device/host_words.h"
#include "util/ref.h"

namespace crossrail {

// Words in host memory through which a counter (ImmCounter::raise) hands its counts to kernels: as credits, like those
// that its own waits consume. It must stay alive until the kernels that wait on it have run, and as long as a graph
// with such a kernel may be launched. Threads: give() and end() with the counter's lock held; everything else from any
// thread.
// Invariant: nothing is given after end().
class CountFlag : public RefCounted<CountFlag> {
 public:
  // in_real_time: false for a simulated engine.
  explicit CountFlag(bool in_real_time);

  void give(uint64_t counts);
  // No more counts will follow: kernels that wait for more give up and report it.
  void end();

  uint64_t given() const;
  uint64_t taken() const;  // consumed by kernels
  bool has_ended() const;
  // Call once, after end(): what was given and not consumed by any kernel, and now never will be. It belongs to the
  // caller from then on.
  uint64_t take_back();

  // As HostWords::await_counts; count > 0. UsageError in a simulated engine.
  void wait_on(uint64_t stream, int gpu, uint64_t count, uint64_t timeout_ns);
  // Whether a kernel has given up without its counts since the last call: how many it wanted, and whether no more will
  // come. For a CPU that has waited for the kernels' streams. 0: none has.
  struct Missed {
    uint64_t wanted;
    bool has_ended;
  };
  Missed take_missed();

  // Address of the word that holds how many counts were given and, in its highest bit, whether more may follow; 64-byte
  // aligned.
  uint64_t address() const { return reinterpret_cast<uint64_t>(&words_->given); }
  uint64_t address_on(int gpu);

 private:
  struct Unmap {
    void operator()(device::CountWords* words) const;
  };
  const bool in_real_time_;
  const std::unique_ptr<device::CountWords, Unmap> words_;  // a page
  std::atomic<uint64_t> taken_max_{~uint64_t{0}};           // consumed by kernels; take_back() consumed the rest
  device::HostWords for_gpus_;
};

}  // namespace crossrail
