#include "moe/words.h"

#include <algorithm>
#include <optional>

#include "util/clock.h"
#include "util/copy.h"
#include "util/futex.h"
#include "util/mutation.h"
#include "util/spinlock.h"

namespace crossrail::moe {

namespace {

// How long a sleeper goes without checking the owner: a rank that dies wakes nobody.
constexpr int64_t kPeerLookEveryNs = 5'000'000;
// A sealed word does not change while rounds advance, and would seem to be ahead 2^31 rounds later. So it is moved
// forward whenever it is further behind than kSealedBehindMax, to kSealedBehind: both are far from where ranks are that
// lag a few rounds behind us.
constexpr uint32_t kSealedBehindMax = 1u << 30;
constexpr uint32_t kSealedBehind = 1u << 29;
static_assert(kSealedBehind % 2 == 0);  // keeps the parity that marks it as sealed

// To be left out: it is lost and did not say farewell before, which would be no reason to mask it.
bool is_lost(const Awaited& awaited) {
  return awaited.owner != nullptr && awaited.owner->state() == PeerState::kLost &&
         awaited.farewell->value.load(std::memory_order_acquire) == 0;
}

// It sends nothing more, although it owes this round something.
bool has_left(const Awaited& awaited, uint32_t round) {
  // acquire: what its owner published before the farewell is visible here.
  if (awaited.farewell->value.load(std::memory_order_acquire) == 0) return false;
  return !has_come(*awaited.word, round) || (awaited.then != nullptr && !has_come(*awaited.then, round));
}

// Ended properly: everything that it owed to those who wait has arrived, so none of them gives up because of it.
bool has_ended(const Watched& lost) {
  return lost.farewell != nullptr && lost.part != nullptr && lost.farewell->poll() > 0 && lost.part->poll() > 0;
}

// Whether waiting for words[index] has become pointless. Unless we go on without lost owners, any lost owner makes it
// so: the one that we wait for may have noticed it before us, and stopped. So does any owner that left before its part.
WordsOutcome trouble_with(Engine& engine, std::span<const Awaited> words, std::span<const Watched> watched,
                          size_t index, uint32_t round, bool goes_on) {
  if (engine.closed()) return {WordsResult::kClosed, index};
  for (size_t i = 0; i < words.size() && !goes_on; ++i) {
    if (words[i].owner != nullptr && words[i].owner->state() == PeerState::kLost) return {WordsResult::kPeerLost, i};
  }
  for (size_t i = 0; i < watched.size() && !goes_on; ++i) {
    if (watched[i].peer->state() == PeerState::kLost && !has_ended(watched[i]))
      return {WordsResult::kPeerLost, words.size() + i};
  }
  for (size_t i = goes_on ? index : 0; i < words.size(); ++i) {
    // A sealed one is left out.
    const bool is_sealed_off = goes_on && i != index && (words[i].is_masked || is_sealed(*words[i].word, round));
    if (!is_sealed_off && has_left(words[i], round)) return {WordsResult::kLeft, i};
  }
  return {WordsResult::kReady, index};
}

// Whether one of them has left before its part. They report by writes, and a farewell may overtake the others: so it
// counts only once it has been there for a while.
std::optional<size_t> left_before_its_part(std::span<const Watched> watched, int64_t now) {
  for (size_t i = 0; i < watched.size(); ++i) {
    if (watched[i].is_taken_meanwhile || watched[i].farewell == nullptr || watched[i].part == nullptr) continue;
    if (watched[i].farewell->poll() == 0) continue;
    int64_t& seen_ns = *watched[i].farewell_ns;
    if (seen_ns == 0) seen_ns = now;
    const bool owes = watched[i].part->poll() == 0 || (watched[i].then != nullptr && watched[i].then->poll() == 0);
    if (now >= seen_ns + kAfterFarewellNs && owes) return i;
  }
  return std::nullopt;
}

void sleep_on_word(Word& word, uint32_t round, Deadline until) {
  // seq_cst, like the store of the value and the load of the sleepers in publish(): either the owner sees us and wakes
  // us, or we see the value here. A wake-up between the check and the sleep is not lost: the kernel compares the value.
  word.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t seen = word.value.load(std::memory_order_seq_cst);
  if (static_cast<int32_t>(seen - round) < 0) futex_wait(&word.value, seen, until, FutexScope::kShared);
  word.sleepers.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace

bool publish(Word& word, uint32_t round) {
  copy_fence();  // nothing else orders streaming stores
  uint32_t before = word.value.load(std::memory_order_relaxed);
  // An exchange that races with seal(): whichever comes first decides, for everybody.
  if (is_sealed(before, round) || !word.value.compare_exchange_strong(before, round, std::memory_order_seq_cst))
    return false;
  if (word.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(&word.value, FutexScope::kShared);
  return true;
}

bool seal(Word& word, uint32_t round) {
  uint32_t seen = word.value.load(std::memory_order_acquire);
  while (static_cast<int32_t>(seen - round) < 0 && !is_sealed(seen, round)) {
    if (!word.value.compare_exchange_weak(seen, seen + 1, std::memory_order_seq_cst)) continue;
    futex_wake_all(&word.value, FutexScope::kShared);
    return true;
  }
  const bool is_behind = static_cast<int32_t>(seen - round) < 0;
  // If this exchange fails, somebody else was faster.
  if (is_behind && round - seen > kSealedBehindMax)
    word.value.compare_exchange_strong(seen, round - kSealedBehind - 1, std::memory_order_seq_cst);
  return is_behind;
}

WordsOutcome wait_words(Engine& engine, Patience& patience, std::span<const Awaited> words,
                        std::span<const Watched> watched, uint32_t round, Deadline deadline,
                        const InterruptCheck& interrupted, std::vector<size_t>* absent) {
  const bool manual = engine.options().polling == Polling::kManual;
  const bool simulated = engine.options().simulation != nullptr;
  int64_t spin_until = 0;  // 0: not begun
  int64_t yield_from = 0;
  int64_t next_look = 0;
  for (size_t i = 0; i < words.size();) {
    const Awaited& awaited = words[i];
    const bool is_skipped = is_mutated(Mutation::kSkipLastWord) && i + 1 == words.size();
    if (is_skipped || has_come(*awaited.word, round)) {
      ++i;
      continue;
    }
    if (absent != nullptr && (awaited.is_masked || is_sealed(*awaited.word, round)) && seal(*awaited.word, round)) {
      absent->push_back(i++);
      continue;
    }
    if (simulated) {  // nothing arrives while this thread waits: one look is enough
      if (absent != nullptr && is_lost(awaited) && seal(*awaited.word, round)) continue;
      const WordsOutcome trouble = trouble_with(engine, words, watched, i, round, absent != nullptr);
      return trouble.result != WordsResult::kReady ? trouble : WordsOutcome{WordsResult::kLate, i};
    }
    const int64_t now = now_ns();
    if (spin_until == 0) {
      spin_until = now + patience.spin_ns(now);
      yield_from = now + Patience::kYieldAfterNs;
      next_look = now + kPeerLookEveryNs;
    }
    if (now >= std::min(next_look, deadline)) {
      next_look = now + kPeerLookEveryNs;
      if (absent != nullptr && is_lost(awaited) && seal(*awaited.word, round)) continue;
      const WordsOutcome trouble = trouble_with(engine, words, watched, i, round, absent != nullptr);
      // Its last word may have come just before its end.
      if (trouble.result != WordsResult::kReady && !has_come(*awaited.word, round)) return trouble;
      if (const auto gone = left_before_its_part(watched, now)) return {WordsResult::kLeft, words.size() + *gone};
      if (now >= deadline) return {WordsResult::kLate, i};
      if (interrupted.is_due(now) && interrupted.ask(now)) return {WordsResult::kInterrupted, i};
    }
    if (manual) engine.progress();
    if (now < spin_until) {
      if (now < yield_from) {
        cpu_relax();
      } else if (patience.yield()) {
        spin_until = now;
      }
      continue;
    }
    sleep_on_word(*awaited.word, round, std::min(next_look, deadline));
  }
  return {WordsResult::kReady, words.size()};
}

}  // namespace crossrail::moe
