// Rounds whose steps are kernels on streams of the user's: how they learn a round's number, tell the CPU how far they
// are, and wait for what the CPU does. All that is launched is captured with its stream, so the number is in memory: a
// graph that is replayed takes another one each time.
//
// A *number* is a uint64_t in memory of the GPU, one for each round that was opened or captured. Words are pairs on
// cache lines of their own, the first for rounds of even number. A word holds the latest round of its parity that has
// got there. Words are in pinned memory; those that the CPU publishes may be in the GPU's (gdrcopy.h).
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>

namespace crossrail::device {

// Where nobody publishes any more: words stand here then, so that all has come, and whoever waits puts it in place of
// the round's number, by which later kernels know.
inline constexpr uint64_t kNoRound = ~uint64_t{0};

struct alignas(64) RoundWord {
  std::atomic<uint64_t> round{0};
};
using RoundWords = std::array<RoundWord, 2>;
static_assert(sizeof(RoundWords) == 128);

// Whether the words say that this round has got there. acquire: pairs with whoever published, and sees what he wrote.
inline bool has_come(const RoundWords& words, uint64_t round) {
  return words[round % 2].round.load(std::memory_order_acquire) >= round;
}
// release: whoever sees the round there sees what was written before.
inline void publish(RoundWords& words, uint64_t round) {
  words[round % 2].round.store(round, std::memory_order_release);
}

// Words that the CPU publishes, as kernels that wait for them know them. gpu_address: where those of BarMemory are; 0:
// they are pinned, and the driver knows.
struct ToldWords {
  ToldWords(const RoundWords& at, uint64_t in_gpu = 0) : words(at), gpu_address(in_gpu) {}  // NOLINT(*-explicit-*)
  const RoundWords& words;
  uint64_t gpu_address;
};

// Words in memory of other ranks that kernels reach, or of our own that theirs reach: by them a rank tells others how
// far it is without the CPU. table: address, in memory of the stream, of uint64_t [2][count], addresses of such words,
// which are uint64_t, for rounds of even and of odd number. Each holds the latest round of its parity that its writer
// has told.
struct Signals {
  uint64_t table = 0;
  uint64_t count = 0;
};

// Where such steps are done. Threads: any; the order of steps is that of their streams.
struct RoundStream {
  int gpu = -1;         // -1: none; steps are done by the calling thread, before the call returns
  uint64_t stream = 0;  // a cudaStream_t of that GPU, alive
};

// All throw TransportError where the driver is missing or refuses; nothing was launched then.
// A wait of the calling thread asks interrupted, if there is one, every 50 ms whether to end. False: it has ended so.
// An await_round may be repeated then.
using Interrupted = std::function<bool()>;

// The next round: counts up *rounds, puts its number into *number, says so in asked, and waits until it may begin, by
// the word in free. rounds, number: addresses of that stream's memory.
bool open_round(const RoundStream& on, uint64_t rounds, uint64_t number, const ToldWords& free, RoundWords& asked,
                const Interrupted& interrupted = {});
// Says that the round has got there: everything before it in the stream is done, and seen by who sees the word or a
// signal.
void publish_round(const RoundStream& on, uint64_t number, RoundWords& words, const Signals& to = {});
// Until it has got there by the words, if it needs_words, and by all signals. *number becomes kNoRound where nobody
// publishes any more.
bool await_round(const RoundStream& on, uint64_t number, const ToldWords& told, const Signals& from = {},
                 bool needs_words = true, const Interrupted& interrupted = {});

}  // namespace crossrail::device
