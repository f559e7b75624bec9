// Rounds whose steps are kernels on a user's streams: how they learn a round's number, tell the CPU how far they are,
// and wait for the CPU. Every launch is captured with its stream, so the number must be in memory: a replayed graph
// takes another one each time.
//
// A *number* is a uint64_t in GPU memory, one for each round that was opened or captured. Words come in pairs on cache
// lines of their own, the first for even rounds. A word holds the latest round of its parity that has got there. Words
// are in pinned memory; those that the CPU publishes may be in GPU memory (gdrcopy.h).
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>

namespace crossrail::device {

// The value of all words once nobody publishes any more, so that everything counts as having come. A waiting kernel
// puts it in place of the round's number, which tells later kernels.
inline constexpr uint64_t kNoRound = ~uint64_t{0};

struct alignas(64) RoundWord {
  std::atomic<uint64_t> round{0};
};
using RoundWords = std::array<RoundWord, 2>;
static_assert(sizeof(RoundWords) == 128);

// Whether the words say that this round has got there. acquire: pairs with the publisher; what it wrote before is
// visible.
inline bool has_come(const RoundWords& words, uint64_t round) {
  return words[round % 2].round.load(std::memory_order_acquire) >= round;
}
// release: whoever sees the round there sees what was written before.
inline void publish(RoundWords& words, uint64_t round) {
  words[round % 2].round.store(round, std::memory_order_release);
}

// Words that the CPU publishes, as seen by waiting kernels. gpu_address: the address of those in BarMemory; 0: they are
// pinned, and the driver knows.
struct ToldWords {
  ToldWords(const RoundWords& at, uint64_t in_gpu = 0) : words(at), gpu_address(in_gpu) {}  // NOLINT(*-explicit-*)
  const RoundWords& words;
  uint64_t gpu_address;
};

// Words in memory of other ranks that our kernels reach, or in our memory that theirs reach: a rank uses them to tell
// others how far it is without the CPU. table: address, in the stream's memory, of uint64_t [2][count], the addresses
// of such words, which are uint64_t, for even and odd rounds. Each holds the latest round of its parity that its writer
// has announced.
struct Signals {
  uint64_t table = 0;
  uint64_t count = 0;
};

// Where such steps are carried out. Threads: any; steps are ordered by their streams.
struct RoundStream {
  int gpu = -1;         // -1: none; the calling thread carries out steps, before the call returns
  uint64_t stream = 0;  // a valid cudaStream_t of that GPU
};

// All throw TransportError if the driver is missing or refuses; nothing was launched then.
// A waiting call asks interrupted, if set, every 50 ms whether to end. False: it ended for this reason. An await_round
// may then be repeated.
using Interrupted = std::function<bool()>;

// The next round: increments *rounds, puts its number into *number, announces it in asked, and waits until it may
// begin, by the word in free. rounds, number: addresses in the stream's memory.
bool open_round(const RoundStream& on, uint64_t rounds, uint64_t number, const ToldWords& free, RoundWords& asked,
                const Interrupted& interrupted = {});
// Announces that the round has got there: everything before it in the stream is done, and visible to whoever sees the
// word or a signal.
void publish_round(const RoundStream& on, uint64_t number, RoundWords& words, const Signals& to = {});
// Waits until the round has got there according to the words, if it needs_words, and to all signals. *number becomes
// kNoRound if nobody publishes any more.
bool await_round(const RoundStream& on, uint64_t number, const ToldWords& told, const Signals& from = {},
                 bool needs_words = true, const Interrupted& interrupted = {});

}  // namespace crossrail::device
