#include "engine/triggers.h"

#include <algorithm>
#include <utility>

namespace crossrail {

// Check first whether watching has ended: then we see the word's last value.
Triggers::Word Triggers::look(const Watcher& watcher, uint64_t threshold) {
  const bool is_closed = watcher.closed();
  if (is_reached(watcher.value(), threshold)) return Word::kReached;
  return is_closed ? Word::kClosed : Word::kAwaited;
}

Triggers::Word Triggers::hold(Transfer* transfer, Ref<Watcher> watcher, uint64_t threshold) {
  // Before the first look at the word: whoever changes it after that look finds a waiting transfer, and wakes us.
  watcher->add_waiting();
  const uint64_t seen = watcher->value();
  const Word word = look(*watcher, threshold);
  if (word != Word::kAwaited) {
    watcher->remove_waiting(1);
    return word;
  }
  auto held = std::ranges::find_if(held_, [&](const Held& one) { return one.watcher.get() == watcher.get(); });
  if (held == held_.end()) held = held_.insert(held, {std::move(watcher), seen, false, {}});
  held->waiting.push_back({transfer, threshold});
  held->is_unseen = true;  // it may be waiting behind a value other than the one seen by the last look
  size_.fetch_add(1, std::memory_order_relaxed);
  return word;
}

std::vector<Triggers::Due> Triggers::take_due() {
  std::vector<Due> due;
  for (Held& held : held_) {
    const uint64_t now = held.watcher->value();
    const bool is_news = std::exchange(held.seen, now) != now || std::exchange(held.is_unseen, false);
    if (!is_news && !held.watcher->closed()) continue;
    take_from(held, [&](const Waiting& one) {
      const Word word = look(*held.watcher, one.threshold);
      if (word == Word::kAwaited) return false;
      held.is_unseen = due.size() == kDueMax;
      if (held.is_unseen) return false;
      due.push_back({one.transfer, word});
      return true;
    });
  }
  if (!due.empty()) drop_unused();
  return due;
}

std::vector<Transfer*> Triggers::take(const std::function<bool(const Transfer*)>& is_wanted) {
  std::vector<Transfer*> taken;
  for (Held& held : held_) {
    take_from(held, [&](const Waiting& one) {
      const bool takes = is_wanted(one.transfer);
      if (takes) taken.push_back(one.transfer);
      return takes;
    });
  }
  if (!taken.empty()) drop_unused();
  return taken;
}

template <typename Take>
void Triggers::take_from(Held& held, const Take& take) {
  const auto taken = static_cast<uint32_t>(std::erase_if(held.waiting, take));
  held.watcher->remove_waiting(taken);
  size_.fetch_sub(taken, std::memory_order_relaxed);
}

void Triggers::drop_unused() {
  std::erase_if(held_, [](const Held& held) { return held.waiting.empty(); });
}

}  // namespace crossrail
