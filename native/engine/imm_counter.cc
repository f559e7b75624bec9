#include "engine/imm_counter.h"

#include <algorithm>
#include <mutex>
#include <new>
#include <string>

#include "engine/core.h"
#include "engine/engine.h"
#include "engine/wait_until.h"
#include "util/errors.h"
#include "util/futex.h"

namespace crossrail {

namespace {
// Values of a blocked thread's word.
constexpr uint32_t kAwake = 0;
constexpr uint32_t kServed = 1;
constexpr uint32_t kClosed = 2;
constexpr uint32_t kAsleep = 3;

bool is_over(uint32_t word) { return word == kServed || word == kClosed; }
}  // namespace

ImmCounter::ImmCounter(Ref<Engine> engine, uint32_t imm) : engine_(std::move(engine)), imm_(imm) {}
ImmCounter::~ImmCounter() = default;

const Clock& ImmCounter::clock() const { return engine_->clock(); }

uint64_t ImmCounter::poll() const { return poll_units() / kUnitsPerCount; }

bool ImmCounter::try_consume(uint64_t count) {
  // Queued waiters go first. One that is queuing just now may see us overtake it: both asked at the same time. The flag
  // is checked for fairness only; the units are taken seq_cst.
  return !has_waiters_.load(std::memory_order_acquire) && take(count * kUnitsPerCount);
}

// seq_cst, like arrive() and the enqueuers: see there.
bool ImmCounter::take(uint64_t needed) {
  uint64_t units = units_.load(std::memory_order_seq_cst);
  while (units >= needed) {
    // What the writers put in memory before their immediates is visible to whoever takes the counts.
    if (units_.compare_exchange_weak(units, units - needed, std::memory_order_seq_cst)) return true;
  }
  return false;
}

void ImmCounter::arrive(uint64_t units) {
  // seq_cst, like the store of the flag by enqueuers: either we see their flag, or they see our units in serve().
  units_.fetch_add(units, std::memory_order_seq_cst);
  if (has_waiters_.load(std::memory_order_seq_cst)) serve();
}

// The waiter may return from wait() at once, so its word is not touched after this except by the wake-up call, which is
// harmless on a word that no longer exists. acq_rel: the release pairs with the acquire of the blocked thread, which is
// either seen asleep here, or sees this before it sleeps (both change the word by a read-modify-write).
void ImmCounter::tell(std::atomic<uint32_t>* word, uint32_t what) {
  if (word->exchange(what, std::memory_order_acq_rel) == kAsleep) engine_->core().wake_sleepers(word);
}

void ImmCounter::note_waiters() {
  has_waiters_.store(!waiters_.empty() || flag_, std::memory_order_seq_cst);  // see arrive()
}

// First come, first served: a large wait at the head holds back small ones behind it and is never starved. What is left
// goes to the flag.
void ImmCounter::serve() {
  std::lock_guard lock(lock_);
  while (!waiters_.empty()) {
    Waiter& waiter = waiters_.front();
    if (!take(waiter.units)) return;
    if (waiter.futex != nullptr) {
      tell(waiter.futex, kServed);
    } else {
      try {
        waiter.notifier->post(waiter.cookie);
      } catch (const std::bad_alloc&) {
        units_.fetch_add(waiter.units, std::memory_order_seq_cst);
        throw;
      }
    }
    waiters_.pop_front();
  }
  // seq_cst, as in take(): otherwise units that came before the flag was visible could be missed here, and stay until
  // the next arrival.
  while (const uint64_t counts = flag_ ? units_.load(std::memory_order_seq_cst) / kUnitsPerCount : 0) {
    if (take(counts * kUnitsPerCount)) flag_->give(counts);
  }
  note_waiters();
}

Ref<CountFlag> ImmCounter::raise() {
  auto flag = Ref<CountFlag>::adopt(new CountFlag(!engine_->core().is_simulated()));
  {
    std::lock_guard lock(lock_);
    if (closed()) throw EngineClosedError("the counter of immediate " + std::to_string(imm_) + " is closed");
    if (flag_) throw UsageError("immediate " + std::to_string(imm_) + " has a flag already: close that one first");
    flag_ = flag;
    note_waiters();
  }
  serve();
  return flag;
}

void ImmCounter::lower(CountFlag* flag) {
  {
    std::lock_guard lock(lock_);
    if (flag_.get() != flag) return;
    flag->end();
    flag_ = nullptr;
    note_waiters();
  }
  if (const uint64_t left = flag->take_back(); left > 0) arrive(left * kUnitsPerCount);
}

bool ImmCounter::try_waiting(uint64_t* needed_units, uint64_t* units) const {
  if (!has_waiters_.load(std::memory_order_acquire) || !lock_.try_lock_for_a_moment()) return false;
  std::lock_guard lock(lock_, std::adopt_lock);
  if (waiters_.empty()) return false;
  *needed_units = waiters_.front().units;
  *units = poll_units();
  return true;
}

void ImmCounter::close() {
  std::lock_guard lock(lock_);
  closed_.store(true, std::memory_order_release);  // pairs with closed(): the engine's end is visible, too
  for (Waiter& waiter : waiters_) {
    if (waiter.futex != nullptr) {
      tell(waiter.futex, kClosed);
    } else {
      waiter.notifier->post(waiter.cookie);
    }
  }
  waiters_.clear();
  if (flag_) flag_->end();
  flag_ = nullptr;
  note_waiters();
}

void ImmCounter::check_settled() const {
  const std::string what = "immediate " + std::to_string(imm_) + " cannot be released: ";
  {
    std::lock_guard lock(lock_);  // a waiter just served may get here before serve() has removed it from the list
    if (!waiters_.empty()) throw UsageError(what + "somebody waits for it");
    if (flag_) throw UsageError(what + "a flag is raised for it");
  }
  if (const uint64_t part = poll_units() % kUnitsPerCount; part != 0) {
    throw UsageError(
        what + std::to_string(part) + "/" + std::to_string(kUnitsPerCount) +
        " of a count have arrived, the rest is under way, or was when its region was closed or revoked; force "
        "drops it");
  }
}

uint64_t ImmCounter::notify(uint64_t count, Notifier* notifier, uint64_t cookie) {
  uint64_t ticket;
  {
    std::lock_guard lock(lock_);
    ticket = next_ticket_++;
    if (closed()) {
      notifier->post(cookie);
      return ticket;
    }
    waiters_.push_back({ticket, count * kUnitsPerCount, Ref<Notifier>::share(notifier), nullptr, cookie});
    note_waiters();
  }
  try {
    serve();
  } catch (const std::bad_alloc&) {  // to tell us, or somebody before us; our caller will not expect to be told
    if (withdraw(ticket)) throw;
  }
  return ticket;
}

bool ImmCounter::cancel_notify(uint64_t ticket) {
  if (!withdraw(ticket)) return false;
  serve();  // the withdrawn wait may have held back smaller ones
  return true;
}

bool ImmCounter::withdraw(uint64_t ticket) {
  std::lock_guard lock(lock_);
  const bool is_queued = std::erase_if(waiters_, [&](const Waiter& waiter) { return waiter.ticket == ticket; }) > 0;
  if (is_queued) note_waiters();
  return is_queued;
}

// Queues before it drives: whoever asks later is served later.
WaitResult ImmCounter::wait(uint64_t count, Deadline deadline, const InterruptCheck& interrupted) {
  if (try_consume(count)) return WaitResult::kReady;
  std::atomic<uint32_t> word{kAwake};
  uint64_t ticket;
  {
    std::lock_guard lock(lock_);
    if (closed()) return WaitResult::kClosed;
    ticket = next_ticket_++;
    waiters_.push_back({ticket, count * kUnitsPerCount, nullptr, &word, 0});
    note_waiters();
  }
  // acquire: pairs with the release in tell().
  const auto ready = [&] { return is_over(word.load(std::memory_order_acquire)); };
  const auto sleep = [&](EngineCore::Guest& guest, Deadline until) {
    uint32_t seen = kAwake;
    if (!word.compare_exchange_strong(seen, kAsleep, std::memory_order_acq_rel)) return;
    engine_->core().sleep_on(guest, &word, kAsleep, until);
    seen = kAsleep;
    word.compare_exchange_strong(seen, kAwake, std::memory_order_acq_rel);  // otherwise it is over
  };
  // Our word is on this stack, so the waiter must leave the queue before we return. Being served at the last moment
  // counts.
  const auto leave = [&] {
    if (!ready() && cancel_notify(ticket)) return false;
    while (!ready()) cpu_relax();
    return true;
  };
  WaitResult result;
  try {
    serve();
    result = engine_->core().wait_until(ready, sleep, deadline, interrupted);
  } catch (...) {  // a simulation in which nothing is left to happen, or no memory to tell another waiter
    if (leave() && word.load(std::memory_order_acquire) == kServed) arrive(count * kUnitsPerCount);
    throw;
  }
  if (!leave()) return result;
  const bool is_served = word.load(std::memory_order_acquire) == kServed;
  if (result == WaitResult::kInterrupted) {  // nobody would learn that counts were taken while the check ran
    if (is_served) arrive(count * kUnitsPerCount);
    return result;
  }
  return is_served ? WaitResult::kReady : WaitResult::kClosed;
}

}  // namespace crossrail
