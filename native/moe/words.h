// Words through which ranks that share memory tell each other their progress.
//
// A word is in memory that its owner allocated (Engine::alloc) and others map (Engine::map). Its owner publishes rounds
// in it, and it only grows: the number of a round, modulo 2^32. So a thread that waits for a round is not misled by a
// word that is ahead.
//
// A rank that gives up on an owner *seals* the word: from then on nothing can be published in it, so all others come to
// the same conclusion, whenever they look and whatever they know about the owner. The rounds of a word are all even or
// all odd, and a sealed word is one more than the last of them: its lowest bit tells.
//
// Threads: publish() from one at a time; seal() and wait_words() from any.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/engine.h"
#include "engine/patience.h"

namespace crossrail::moe {

// On a cache line of its own, so that polling one word does not disturb the writer of another. "Nothing yet" is a value
// two before the first round: -1 for odd rounds, 0 for even ones, which is the initial content of the engine's memory.
struct alignas(64) Word {
  std::atomic<uint32_t> value;
  // The number of sleepers on it, in any process. One that is killed while asleep is never subtracted: that costs the
  // owner a system call per publish, and nothing else.
  std::atomic<uint32_t> sleepers;
};
static_assert(sizeof(Word) == 64);

// Everything that this thread wrote before, including streaming stores, is visible to whoever sees the word. False: it
// is sealed, and nothing was published.
bool publish(Word& word, uint32_t round);

// `round`: any round of that word.
inline bool is_sealed(uint32_t value, uint32_t round) { return ((value ^ round) & 1) != 0; }
inline bool is_sealed(const Word& word, uint32_t round) {
  // acquire, also for what was read before: pairs with seal(), after which others may write to what the owner reads.
  std::atomic_thread_fence(std::memory_order_acquire);
  return is_sealed(word.value.load(std::memory_order_acquire), round);
}

// Whether the word stands at `round` or later.
inline bool has_come(const Word& word, uint32_t round) {
  // acquire: pairs with the store in publish().
  return static_cast<int32_t>(word.value.load(std::memory_order_acquire) - round) >= 0;
}

// Seals the word unless it is at `round` or later. True: it is sealed before that round, by us or by another. For a
// sealed word, somebody must ask this in every round, or at least in every 2^30: otherwise it would seem to be ahead
// after 2^31.
bool seal(Word& word, uint32_t round);

// What is awaited, and from whom.
struct Awaited {
  Word* word = nullptr;
  Word* farewell = nullptr;    // not 0 once the owner has given up
  const Word* then = nullptr;  // what the owner owes this round after that; null: nothing
  Peer* owner = nullptr;       // null: ourselves
  bool is_masked = false;      // with `absent`: not waited for
};

// A far rank, which has no word here.
struct Watched {
  Peer* peer = nullptr;
  // What it counts here in place of these words, and once it has given up; null where it counts nothing.
  const ImmCounter* part = nullptr;
  const ImmCounter* farewell = nullptr;
  const ImmCounter* then = nullptr;
  // When a wait first saw its farewell, 0: not yet. It outlives the waits: many may be short.
  int64_t* farewell_ns = nullptr;
  // Its counts may be taken before the words arrive, so a count of zero says nothing.
  bool is_taken_meanwhile = false;
};

enum class WordsResult : uint8_t {
  kReady,
  kLate,         // the deadline passed
  kPeerLost,     // the owner of a word is lost, whether or not the word has arrived
  kLeft,         // an owner, or one of `watched`, said farewell, and owes the round something
  kClosed,       // our engine was closed
  kInterrupted,  // the interrupt check said stop
};
// How long after a farewell far writes that were done before it may still be counted: done there does not mean counted
// here yet.
inline constexpr int64_t kAfterFarewellNs = 100'000'000;
struct WordsOutcome {
  WordsResult result;
  size_t index;  // of the lost or left owner, else of the first word that has not come; kReady: the number of words
};

// Returns once all words are at `round` or later, once it is certain that one of them never will be, or at the
// deadline. Spins for the engine's spin_ns, then sleeps. Drives an engine of Polling::kManual meanwhile; otherwise only
// its worker drives it. In a simulation nobody else runs while we wait: whatever has not arrived by then is late
// at once.
// patience: of those who wait like this one.
// watched: other ranks without which the wait is just as pointless, unless they had done their part and said farewell
// before they were lost or left; their indices follow those of the words.
// absent: null, or the wait goes on without owners that are lost and did not say farewell: their words are sealed, and
// the indices of those sealed before `round` are put there. The result is then never kPeerLost.
WordsOutcome wait_words(Engine& engine, Patience& patience, std::span<const Awaited> words,
                        std::span<const Watched> watched, uint32_t round, Deadline deadline,
                        const InterruptCheck& interrupted, std::vector<size_t>* absent = nullptr);

}  // namespace crossrail::moe
