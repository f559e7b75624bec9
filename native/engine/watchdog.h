// Finds what has stopped moving, reports it once per stall, and has the flight recorder written.
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

// Tells a stall from a pause. It has no clock: it is given counts and the time.
class StallFinder {
 public:
  explicit StallFinder(int64_t patience_ns) : patience_ns_(patience_ns) {}

  // What is seen of `who` now: how many things wait, and a count that changes whenever one of them moves. True once per
  // stall: when something has waited for the patience without any movement.
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
  std::map<uint32_t, Seen> seen_;  // only those with something waiting
};

// Watches an engine's peers, and whether anybody drives the engine, from its own thread: the progress holder may be
// what hangs. It takes no lock that the holder keeps while it works.
//
// Recordings are large and stalls may be many. So one recording serves all stalls found in one look, and there is none
// within kDumpPauseNs of the last one or after kDumpsMax of them. Stalls without a new recording are still reported.
// Threads: start, stop: one at a time. look: the watchdog's own thread, or the driving thread of an engine without
// threads.
class Watchdog {
 public:
  Watchdog(EngineCore* core, int64_t patience_ns);
  ~Watchdog() { stop(); }
  void start();
  void stop();
  void abandon_after_fork();

  static constexpr int64_t kDumpPauseNs = 60'000'000'000;
  static constexpr uint32_t kDumpsMax = 16;

  // One look. now: in nanoseconds, of any clock, always the same one.
  void look(int64_t now);
  // How often to look, so that a stall is reported within a quarter of its patience.
  int64_t pause_ns() const { return pause_ns_; }

 private:
  struct Stall {
    std::string peer;  // empty: the engine itself
    std::string what;
  };
  void run();
  void tell(const std::vector<Stall>& stalls, int64_t now);
  // Returns where these were written, or why not.
  std::string dump(const std::vector<Stall>& stalls, int64_t now);

  EngineCore* const core_;
  const int64_t pause_ns_;
  StallFinder finder_;
  uint64_t rounds_before_ = 0;  // as of the previous look
  uint32_t dumps_ = 0;          // recordings written so far
  int64_t dumped_ns_ = 0;       // time of the last one
  std::string dumped_to_;       // and its file
  std::mutex mutex_;            // guards stopping_
  std::condition_variable changed_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace crossrail
