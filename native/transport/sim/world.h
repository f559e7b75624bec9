// A simulated world: a seed, a virtual clock, hosts with rails, and the engines on them, which get their turns from it.
//
// Everything that happens is an event at a point in time; of two events at the same time, the one scheduled first comes
// first. All choices come from the seed. So a single thread that does the same things again sees the same results, byte
// for byte; with several threads it is merely safe.
//
// Threads: any; one at a time is inside (mutex_). The lock is not held while the user's callbacks run, or an engine
// dies.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "transport/sim/events.h"
#include "transport/sim/fabric.h"
#include "transport/sim/log.h"
#include "transport/sim/prng.h"
#include "transport/sim/visitors.h"
#include "transport/simulation.h"

namespace crossrail::sim {

class World final : public Simulation {
 public:
  // twin: distinguishes worlds with the same seed, which are otherwise alike to the last bit.
  World(uint64_t seed, size_t log_lines_max, uint64_t twin = 0);
  ~World() override;

  // The clock's value when virtual time begins, which is never 0.
  static constexpr int64_t kOriginNs = 1'000'000'000;

  // --- Simulation ---
  int64_t now_ns() const override { return now_ns_.load(std::memory_order_relaxed); }
  void pass() override;
  void fill(std::span<uint8_t> bytes) override;
  uint32_t enter(Actor* actor, uint32_t host, const std::string& name) override;
  void leave(uint32_t actor) override;
  void wake(uint32_t actor) override;
  void watches_words(uint32_t actor) override;
  void after_turn(std::function<void()> deed) override;
  std::string host_name(uint32_t host) const override;
  Step advance(Deadline until) override { return advance(until, kNoDeadline); }
  bool has_callbacks() const override { return has_callbacks_ && has_callbacks_(); }
  void run_callbacks() override;

  // The same, but the clock stops at `limit` even for a longer wait: the result is then kReached as well. Without
  // `until`, it is still kIdle if nothing is left to happen.
  Step advance(Deadline until, Deadline limit);
  // Somebody begins to wait: engines whose watched words have changed look at them.
  void wake_watchers();
  // Nothing is in flight, nobody is busy, no fault is scheduled: only timers of idle engines are left.
  bool is_calm() const;
  // Runs the user's callbacks while somebody waits. is_due may be called often; run is called without the lock.
  void set_callbacks(std::function<bool()> is_due, std::function<void()> run);

  // --- what happens on purpose: at once when at_ns is not in the future, else then ---
  void at(int64_t at_ns, std::function<void()> deed);
  // fault: the freeze that begins, or ends; kEveryFault ends all.
  void freeze(uint32_t actor, bool frozen, FaultNumber fault);
  void kill(uint32_t actor);
  // The engines present now, in the order in which they came.
  std::vector<uint32_t> engines_on(uint32_t host) const;

  const std::string& id() const { return id_; }  // unique to this seed and twin; part of addresses
  std::vector<std::string> log_lines() const;
  std::string log_digest() const;
  Totals totals() const;

  // For NICs and bindings, which hold the lock.
  std::recursive_mutex& lock() const { return mutex_; }
  Fabric& fabric() { return fabric_; }
  Prng& prng() { return prng_; }
  EventLog& log() { return log_; }
  int64_t log_time() const { return now_ns() - kOriginNs; }
  void set_time(int64_t time_ns) { now_ns_.store(time_ns, std::memory_order_relaxed); }

 protected:
  void begin_wait() override;
  void end_wait() override;

 private:
  struct Seat {
    Actor* actor = nullptr;  // null: it left, or was killed
    uint32_t host = 0;
    bool is_frozen = false;
    StandingFaults freezes;             // frozen if there are any
    bool has_news = false;              // arrived while frozen
    int64_t turn_at_ns = kNoDeadline;   // a turn is scheduled
    int64_t timer_ns = kNoDeadline;     // the time that it asked for,
    int64_t timer_at_ns = kNoDeadline;  // and that of the event that checks it
  };
  void schedule_turn(uint32_t number, int64_t at_ns);
  void give_turn(uint32_t number);
  bool look_at_timer(uint32_t number, int64_t at_ns);
  bool is_idle();
  Step go_on(Deadline until, Deadline limit, std::unique_lock<std::recursive_mutex>* held);
  bool happens(const Event& event, std::unique_lock<std::recursive_mutex>* held);

  mutable std::recursive_mutex mutex_;
  // Changed by the holder of mutex_; engines read it in every round, without. Relaxed: it orders nothing.
  std::atomic<int64_t> now_ns_ = kOriginNs;
  Prng prng_;
  Prng entropy_;  // separate: the number of bits that an engine asks for changes nothing else
  EventLog log_;
  EventQueue events_;
  Fabric fabric_;
  const std::string id_;
  std::vector<Seat> seats_;
  std::set<uint32_t> watching_;   // seats, including left ones, whose words are checked at each wait
  std::vector<Event> postponed_;  // by pass()
  bool in_turn_ = false;
  std::vector<std::function<void()>> after_turn_;
  std::map<uint32_t, std::function<void()>> deeds_;
  uint32_t next_deed_ = 0;
  int64_t calm_since_ns_ = kOriginNs;
  int64_t stuck_since_ns_ = kOriginNs;
  uint64_t outcomes_ = 0;  // of all engines, at the last look
  Visitors visitors_;
  std::function<bool()> has_callbacks_;
  std::function<void()> run_callbacks_;
};

}  // namespace crossrail::sim
