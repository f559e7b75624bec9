// Where engines run that have no threads of their own: a simulated world, seen from the engine. It has their clock,
// their random bits, and gives them their turns.
//
// Threads: one at a time. What is marked [any] may come from any thread; determinism is promised only where one thread
// does everything.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "util/clock.h"
#include "util/entropy.h"

namespace crossrail {

// An engine, as the simulation sees it. All calls come from inside Simulation::advance(), on the thread that waits
// there.
class Actor {
 public:
  // One round. True: there is more to do at once.
  virtual bool turn() = 0;
  // Wants a turn by then. Asked after turn().
  virtual Deadline next_timer() const = 0;
  // The user has changed words of it without telling anybody. Asked once watches_words() was called.
  virtual bool has_changed_words() const = 0;
  // Something that was begun has not ended yet.
  virtual bool is_busy() const = 0;
  // Grows with everything that its user could have waited for.
  virtual uint64_t outcomes() const = 0;
  // How long it waits for its peers at most.
  virtual int64_t patience_ns() const = 0;
  // Ends like a process that was killed: everything of it completes, nothing is told to peers.
  virtual void die() = 0;

 protected:
  ~Actor() = default;
};

class Simulation : public Clock, public Entropy {
 public:
  virtual ~Simulation() = default;

  // --- of one engine: enter, turns, leave. No turn before the first wake() ---
  // The number by which its NICs and wake() name it. Throws UsageError for a host that is not there.
  virtual uint32_t enter(Actor* actor, uint32_t host, const std::string& name) = 0;
  virtual void leave(uint32_t actor) = 0;
  // [any] It has news, and wants a turn.
  virtual void wake(uint32_t actor) = 0;
  // [any] From now on it has words that a user may change without telling anybody.
  virtual void watches_words(uint32_t actor) = 0;
  // Now, or, from inside a turn, right after it: for what must not happen within.
  virtual void after_turn(std::function<void()> deed) = 0;
  // What the engines of that host call it: part of their addresses.
  virtual std::string host_name(uint32_t host) const = 0;

  // --- of who waits ---
  // RAII of one wait: how the simulation knows whether anybody is still about to do something.
  class Wait {
   public:
    explicit Wait(Simulation* simulation) : simulation_(simulation) { simulation_->begin_wait(); }
    ~Wait() { simulation_->end_wait(); }
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

   private:
    Simulation* const simulation_;
  };
  enum class Step : uint8_t {
    kMoved,    // something happened: look whether it is what you wait for
    kReached,  // nothing is left to happen before `until`, and it is `until` now
    kIdle,     // nothing is left to happen at all, and there is no `until`
    kHeld      // another thread may be about to do something: wait a moment of real time, ask again
  };
  // What happens next happens: events up to an engine's turn, or the clock goes to `until`. Never past it.
  virtual Step advance(Deadline until) = 0;
  // Callbacks of the user are due: who waits runs them, by run_callbacks(), between steps.
  virtual bool has_callbacks() const = 0;
  virtual void run_callbacks() = 0;

 protected:
  virtual void begin_wait() = 0;
  virtual void end_wait() = 0;
};

}  // namespace crossrail
