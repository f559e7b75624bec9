#include "engine/imm_table.h"

#include <mutex>

#include "engine/engine.h"
#include "util/errors.h"
#include "util/mutation.h"

namespace crossrail {

Ref<ImmCounter> ImmTable::find_or_add(Engine* engine, uint32_t imm) {
  std::lock_guard lock(lock_);
  const auto found = counters_.find(imm);
  if (found != counters_.end()) return found->second;
  if (counters_.size() >= capacity_) return nullptr;
  return add(engine, imm);
}

void ImmTable::throw_full() const {
  throw UsageError("imm_counters_max = " + std::to_string(capacity_) +
                   " counters exist already: release some, or raise it");
}

// With the lock held, for a number without a counter.
Ref<ImmCounter> ImmTable::add(Engine* engine, uint32_t imm) {
  auto counter = Ref<ImmCounter>::adopt(new ImmCounter(Ref<Engine>::share(engine), imm));
  if (closed_) {
    counter->close();
  } else {
    counters_.emplace(imm, counter);
  }
  return counter;
}

// A number without a counter: one for which something has arrived since its release is taken out of circulation.
uint32_t ImmTable::draw() {
  while (next_ <= kImmMax && counters_.contains(next_)) ++next_;
  if (next_ <= kImmMax && released_.size() < kRestingMax) return next_++;
  while (!released_.empty()) {
    const uint32_t imm = released_.front();
    released_.pop_front();
    if (!counters_.contains(imm)) return imm;
  }
  if (next_ <= kImmMax) return next_++;
  throw UsageError("all " + std::to_string(kImmMax - first_ + 1) + " immediate numbers are in use: release some");
}

// Drawn and given its counter under one lock: nothing can arrive in between and pass for a count of the new owner's.
Ref<ImmCounter> ImmTable::allocate(Engine* engine) {
  std::lock_guard lock(lock_);
  if (counters_.size() >= capacity_) throw_full();
  return add(engine, draw());
}

void ImmTable::release(uint32_t imm, bool force) {
  Ref<ImmCounter> dropped;
  {
    std::lock_guard lock(lock_);
    const auto found = counters_.find(imm);
    if (found == counters_.end()) return;
    if (!force) found->second->check_settled();
    if (imm >= first_ && next_ > imm) released_.push_back(imm);  // first: there may be no memory for it
    dropped = found->second;
    counters_.erase(found);
    if (is_mutated(Mutation::kReuseImmediateEarly) && imm >= first_) next_ = std::min(next_, imm);
    // release: pairs with the acquire in note_arrival; the holder then drops its remembered counter.
    releases_.fetch_add(1, std::memory_order_release);
  }
  dropped->close();
}

void ImmTable::close_all() {
  std::unordered_map<uint32_t, Ref<ImmCounter>> counters;
  {
    std::lock_guard lock(lock_);
    closed_ = true;
    counters.swap(counters_);
    releases_.fetch_add(1, std::memory_order_release);
  }
  for (auto& [imm, counter] : counters) counter->close();
}

bool ImmTable::note_arrival(Engine* engine, uint32_t imm, uint64_t units) {
  const uint64_t releases = releases_.load(std::memory_order_acquire);
  if (!last_ || last_->imm() != imm || last_releases_ != releases) {
    flush_arrivals();
    last_ = find_or_add(engine, imm);
    last_releases_ = releases;
    if (!last_) return false;
  }
  gathered_units_ += units;
  return true;
}

void ImmTable::flush_arrivals() {
  if (gathered_units_ == 0) return;
  last_->arrive(std::exchange(gathered_units_, 0));
}

void ImmTable::end_arrivals() {
  flush_arrivals();
  last_ = nullptr;
}

}  // namespace crossrail
