// Finds what has stopped moving, says so once per stall, and has the flight recorder written.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace crossrail {

class EngineCore;

// Tells a stall from a pause. Knows no clock: it is shown counts and the time.
class StallFinder {
 public:
  explicit StallFinder(int64_t patience_ns) : patience_ns_(patience_ns) {}

  // What is seen of `who` now: how much waits, and a count that changes whenever something of it moves.
  // True once per stall: when something has waited without a move for the patience.
  bool look(uint32_t who, uint64_t waiting, uint64_t moves, int64_t now);
  // For how long it has not moved.
  int64_t still_ns(uint32_t who, int64_t now) const;

 private:
  struct Seen {
    uint64_t moves;
    int64_t since_ns;
    bool is_told;
  };
  const int64_t patience_ns_;
  std::map<uint32_t, Seen> seen_;  // whom something waits for
};

// Watches an engine's peers, and whether anybody drives it, from a thread of its own: the progress holder may be what
// hangs. It takes no lock that the holder keeps while it works.
//
// Recordings are large and stalls may be many, so one recording serves all stalls found in one look, and there is none
// within kDumpPauseNs of the last one, or after kDumpsMax of them. Stalls without a recording are reported all the
// same.
// Threads: start, stop: one at a time. look: the watchdog's own thread, or whoever drives an engine without threads.
class Watchdog {
 public:
  Watchdog(EngineCore* core, int64_t patience_ns);
  ~Watchdog() { stop(); }
  void start();
  void stop();
  void abandon_after_fork();

  static constexpr int64_t kDumpPauseNs = 60'000'000'000;
  static constexpr uint32_t kDumpsMax = 16;

  // One look. now: in nanoseconds, of any one clock.
  void look(int64_t now);
  // How often to look, for a stall to be told within a quarter of its patience.
  int64_t pause_ns() const { return pause_ns_; }

 private:
  struct Stall {
    std::string peer;  // empty: the engine itself
    std::string what;
  };
  void run();
  void tell(const std::vector<Stall>& stalls, int64_t now);
  // Where these were written down, or why not.
  std::string dump(const std::vector<Stall>& stalls, int64_t now);

  EngineCore* const core_;
  const int64_t pause_ns_;
  StallFinder finder_;
  uint64_t rounds_before_ = 0;  // at the look before
  uint32_t dumps_ = 0;          // written,
  int64_t dumped_ns_ = 0;       // the last one when,
  std::string dumped_to_;       // and where
  std::mutex mutex_;            // guards stopping_
  std::condition_variable changed_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace crossrail
