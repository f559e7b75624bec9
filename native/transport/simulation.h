// A simulated world as its engines see it. Such engines have no threads of their own: the world gives them their clock,
// their random bits and their turns to run.
//
// Threads: one at a time. Calls marked [any] may come from any thread; determinism is promised only if a single thread
// does everything.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "util/clock.h"
#include "util/entropy.h"

namespace crossrail {

// An engine as the simulation sees it. All calls come from inside Simulation::advance(), on the thread that waits
// there.
class Actor {
 public:
  // One round. True: there is more to do right away.
  virtual bool turn() = 0;
  // When it needs its next turn at the latest. Asked after turn().
  virtual Deadline next_timer() const = 0;
  // The user has changed one of its words without announcing it. Asked once watches_words() was called.
  virtual bool has_changed_words() const = 0;
  // Something that it began has not ended yet.
  virtual bool is_busy() const = 0;
  // Grows with every event that its user might be waiting for.
  virtual uint64_t outcomes() const = 0;
  // The longest time that it waits for a peer.
  virtual int64_t patience_ns() const = 0;
  // Ends like a killed process: all of its operations complete, and peers are told nothing.
  virtual void die() = 0;

 protected:
  ~Actor() = default;
};

class Simulation : public Clock, public Entropy {
 public:
  virtual ~Simulation() = default;

  // --- of one engine: enter, turns, leave. No turn before the first wake() ---
  // Returns the number by which its NICs and wake() refer to it. Throws UsageError if there is no such host.
  virtual uint32_t enter(Actor* actor, uint32_t host, const std::string& name) = 0;
  virtual void leave(uint32_t actor) = 0;
  // [any] It has work and wants a turn.
  virtual void wake(uint32_t actor) = 0;
  // [any] From now on it has words that a user may change without announcing it.
  virtual void watches_words(uint32_t actor) = 0;
  // Runs `deed` now or, when called from inside a turn, right after that turn: for what must not happen within one.
  virtual void after_turn(std::function<void()> deed) = 0;
  // The host's name as its engines put it into their addresses.
  virtual std::string host_name(uint32_t host) const = 0;

  // --- of who waits ---
  // RAII for one wait: lets the simulation know whether some thread may still be about to act.
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
    kMoved,    // something happened: check whether it is what you wait for
    kReached,  // nothing was left to happen before `until`, and the clock is at `until` now
    kIdle,     // nothing is left to happen at all, and there is no `until`
    kHeld      // another thread may be about to act: wait a moment of real time and ask again
  };
  // Lets the next thing happen: processes events up to an engine's turn, or moves the clock to `until`, never past it.
  virtual Step advance(Deadline until) = 0;
  // Callbacks of the user are due: the waiting thread runs them, by run_callbacks(), between steps.
  virtual bool has_callbacks() const = 0;
  virtual void run_callbacks() = 0;

 protected:
  virtual void begin_wait() = 0;
  virtual void end_wait() = 0;
};

}  // namespace crossrail
