#include "engine/count_flag.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

#include "util/errors.h"

namespace crossrail {

using device::CountWords;

namespace {

constexpr size_t kPageBytes = 4096;

// Shared: after a fork, copy-on-write would separate the page that this process sees from the one that GPUs see.
CountWords* map_words() {
  void* const memory = mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw_errno("mmap", "cannot allocate the words of a flag");
  return new (memory) CountWords;
}

}  // namespace

void CountFlag::Unmap::operator()(CountWords* words) const { munmap(words, kPageBytes); }

CountFlag::CountFlag(bool in_real_time)
    : in_real_time_(in_real_time), words_(map_words()), for_gpus_(words_.get(), kPageBytes) {}

// release: pairs with the acquire of await_counts and of given(). Whoever sees the counts also sees the data that the
// writers put in place before, as does a waiter that consumes them from the counter.
void CountFlag::give(uint64_t counts) { words_->given.fetch_add(counts, std::memory_order_release); }

// release: pairs with the acquire in has_ended().
void CountFlag::end() { words_->given.fetch_or(CountWords::kEnded, std::memory_order_release); }

uint64_t CountFlag::given() const {
  return words_->given.load(std::memory_order_acquire) & ~CountWords::kEnded;  // pairs with give()
}

// acquire: whatever a kernel read on the strength of these counts happened before; and whoever sees the addition in
// take_back() sees the limit.
uint64_t CountFlag::taken() const {
  const uint64_t taken = words_->taken.load(std::memory_order_acquire);
  return std::min(taken, taken_max_.load(std::memory_order_relaxed));
}

// Consumes them as a kernel would: one that runs later, in a replayed graph, finds nothing.
uint64_t CountFlag::take_back() {
  const uint64_t by_kernels = taken();
  const uint64_t left = given() - by_kernels;
  taken_max_.store(by_kernels, std::memory_order_relaxed);
  words_->taken.fetch_add(left, std::memory_order_release);  // pairs with taken()
  return left;
}

bool CountFlag::has_ended() const {
  return (words_->given.load(std::memory_order_acquire) & CountWords::kEnded) != 0;  // pairs with end()
}

void CountFlag::wait_on(uint64_t stream, int gpu, uint64_t count, uint64_t timeout_ns) {
  if (!in_real_time_) throw UsageError("a kernel runs in real time, and a simulated engine does not: use wait()");
  for_gpus_.await_counts(words_.get(), count, timeout_ns, stream, gpu);
}

CountFlag::Missed CountFlag::take_missed() {
  // acq_rel: a kernel that is launched later sees that it may wait.
  const uint64_t missed = words_->missed.exchange(0, std::memory_order_acq_rel);
  return {missed & ~CountWords::kEnded, (missed & CountWords::kEnded) != 0};
}

uint64_t CountFlag::address_on(int gpu) {
  if (!in_real_time_) throw UsageError("a simulated engine has no GPU: use address");
  return for_gpus_.address_on(gpu, &words_->given);
}

}  // namespace crossrail
