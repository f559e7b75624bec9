#include "device/round_words.h"

#include <algorithm>
#include <initializer_list>
#include <span>
#include <string>

#include "device/capture.h"
#include "device/cuda.h"
#include "device/kernels.h"
#include "util/clock.h"
#include "util/errors.h"
#include "util/spinlock.h"

namespace crossrail::device {

namespace {

constexpr const char* kWhatFor = "a kernel of rounds";
constexpr unsigned kWarp = 32;  // threads, which share the polling of signals
constexpr int64_t kAskEveryNs = 50'000'000;

// Their address for kernels on the current GPU.
uint64_t address_of(const Driver& driver, const ToldWords& told) {
  uint64_t address = told.gpu_address;
  if (address != 0) return address;
  void* const words = const_cast<RoundWords*>(&told.words);
  if (const int code = driver.pinned_address(&address, words, 0); code != 0)
    fail(driver, "cuMemHostGetDevicePointer", code, "the GPU does not reach the words of rounds", "see nvidia-smi");
  return address;
}

// numbers, followed by the words: the kernel's arguments.
void launch(const RoundStream& on, void* Kernels::* kernel, unsigned threads, std::span<uint64_t> numbers,
            std::initializer_list<ToldWords> words) {
  std::string why;
  const Driver* const driver = find_driver(&why);
  if (driver == nullptr)
    throw TransportError("launch", 0, "rounds on a GPU need NVIDIA's driver: " + why, "without a GPU use host memory");
  const CurrentContext current(*driver, on.gpu);
  std::array<uint64_t, 2> addresses{};
  void* function = nullptr;
  {
    const OutsideCapture outside(*driver);
    function = kernels_of(*driver, on.gpu, kWhatFor).*kernel;
    std::transform(words.begin(), words.end(), addresses.begin(),
                   [&](const ToldWords& told) { return address_of(*driver, told); });
  }
  std::array<void*, 6> given{};
  size_t count = 0;
  for (uint64_t& number : numbers) given[count++] = &number;
  for (size_t i = 0; i < words.size(); ++i) given[count++] = &addresses[i];
  void* const stream = reinterpret_cast<void*>(on.stream);  // NOLINT(performance-no-int-to-ptr)
  const int code = driver->launch_kernel(function, 1, 1, 1, threads, 1, 1, 0, stream, given.data(), nullptr);
  if (code != 0) {
    fail(*driver, "cuLaunchKernel", code,
         "cannot launch " + std::string(kWhatFor) + " on GPU " + std::to_string(on.gpu),
         "the stream must be alive and of that GPU, in a capture the captured one, and no earlier kernel may have "
         "failed");
  }
}

uint64_t& number_at(uint64_t address) {
  return *reinterpret_cast<uint64_t*>(address);  // NOLINT(performance-no-int-to-ptr)
}

std::atomic_ref<uint64_t> signal_at(const Signals& signals, uint64_t round, uint64_t index) {
  return std::atomic_ref(number_at(number_at(signals.table + (round % 2 * signals.count + index) * sizeof(uint64_t))));
}

// acquire: pairs with the release in publish_round, perhaps in another process.
bool have_come(const Signals& signals, uint64_t round) {
  for (uint64_t i = 0; i < signals.count; ++i) {
    if (signal_at(signals, round, i).load(std::memory_order_acquire) < round) return false;
  }
  return true;
}

// Ends when the publishing thread publishes, at the latest when that is stopped: see StreamProxy. False: interrupted.
bool wait_here(const RoundWords& words, uint64_t& number, const Interrupted& interrupted, const Signals& from = {},
               bool needs_words = true) {
  const uint64_t round = number;
  int64_t ask_at = 0;  // 0: has not yielded yet
  for (int spins = 0;; ++spins) {
    const bool is_signalled = have_come(from, round);
    if (is_signalled && !needs_words) return true;
    const uint64_t word = words[round % 2].round.load(std::memory_order_acquire);  // as has_come()
    if (word == kNoRound) number = kNoRound;
    if (word == kNoRound || (is_signalled && word >= round)) return true;
    if (spins < 64) {
      cpu_relax();
      continue;
    }
    std::this_thread::yield();
    const int64_t now = now_ns();
    if (ask_at == 0) ask_at = now + kAskEveryNs;
    if (now < ask_at) continue;
    ask_at = now + kAskEveryNs;
    if (interrupted && interrupted()) return false;
  }
}

}  // namespace

bool open_round(const RoundStream& on, uint64_t rounds, uint64_t number, const ToldWords& free, RoundWords& asked,
                const Interrupted& interrupted) {
  if (on.gpu >= 0) {
    std::array<uint64_t, 2> numbers{rounds, number};
    launch(on, &Kernels::open_round, 1, numbers, {free, asked});
    return true;
  }
  const uint64_t round = ++number_at(rounds);
  number_at(number) = round;
  publish(asked, round);
  return wait_here(free.words, number_at(number), interrupted);
}

void publish_round(const RoundStream& on, uint64_t number, RoundWords& words, const Signals& to) {
  if (on.gpu >= 0) {
    std::array<uint64_t, 3> numbers{number, to.table, to.count};
    return launch(on, &Kernels::publish_round, kWarp, numbers, {words});
  }
  const uint64_t round = number_at(number);
  // release: pairs with the acquire in have_come().
  for (uint64_t i = 0; i < to.count && round != kNoRound; ++i)
    signal_at(to, round, i).store(round, std::memory_order_release);
  publish(words, round);
}

bool await_round(const RoundStream& on, uint64_t number, const ToldWords& told, const Signals& from, bool needs_words,
                 const Interrupted& interrupted) {
  if (on.gpu < 0) return wait_here(told.words, number_at(number), interrupted, from, needs_words);
  std::array<uint64_t, 4> numbers{number, from.table, from.count, needs_words ? 1u : 0u};
  launch(on, &Kernels::await_round, kWarp, numbers, {told});
  return true;
}

}  // namespace crossrail::device
