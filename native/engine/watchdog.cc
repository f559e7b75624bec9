#include "engine/watchdog.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "engine/core.h"
#include "engine/dump_triggers.h"
#include "util/clock.h"
#include "util/thread.h"

namespace crossrail {

namespace {

constexpr uint32_t kEngineItself = 0;  // peers' ids begin at 1
constexpr int64_t kPauseNsMin = 1'000'000;
constexpr int64_t kPauseNsMax = 1'000'000'000;

std::string counted(uint64_t count, const char* noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

}  // namespace

bool StallFinder::look(uint32_t who, uint64_t waiting, uint64_t moves, int64_t now) {
  if (waiting == 0) {
    seen_.erase(who);
    return false;
  }
  const auto [at, is_new] = seen_.try_emplace(who, Seen{moves, now, false});
  Seen& seen = at->second;
  if (is_new || seen.moves != moves) {
    seen = {moves, now, false};
    return false;
  }
  if (seen.is_told || now - seen.since_ns < patience_ns_) return false;
  seen.is_told = true;
  return true;
}

int64_t StallFinder::still_ns(uint32_t who, int64_t now) const {
  const auto found = seen_.find(who);
  return found == seen_.end() ? 0 : now - found->second.since_ns;
}

Watchdog::Watchdog(EngineCore* core, int64_t patience_ns)
    : core_(core), pause_ns_(std::clamp(patience_ns / 4, kPauseNsMin, kPauseNsMax)), finder_(patience_ns) {}

void Watchdog::start() {
  thread_ = start_thread([this] { run(); });
}

void Watchdog::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void Watchdog::abandon_after_fork() { leak_thread(thread_); }

void Watchdog::run() {
  pthread_setname_np(pthread_self(), "crossrail-dog");
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    changed_.wait_for(lock, std::chrono::nanoseconds(pause_ns_));
    if (stopping_) return;
    lock.unlock();
    look(now_ns());
    lock.lock();
  }
}

void Watchdog::look(int64_t now) {
  const FlightRecorder& recorder = core_->recorder();
  const EngineStats stats = core_->stats();
  std::vector<Stall> stalls;
  // Submits that nobody takes: with polling="manual" nobody drives, otherwise the progress holder itself hangs.
  if (finder_.look(kEngineItself, core_->submits_waiting(), stats.worker_rounds, now)) {
    stalls.push_back({"", counted(core_->submits_waiting(), "submitted operation") + " of " +
                              std::to_string(stats.transfers_inflight) +
                              " in flight were not picked up: no thread has driven the engine for " +
                              seconds_text(finder_.still_ns(kEngineItself, now))});
  }
  for (size_t i = 0; const auto track = recorder.track(i); ++i) {
    const uint64_t outstanding = track->outstanding.load(std::memory_order_relaxed);
    const uint64_t queued = track->queued.load(std::memory_order_relaxed);
    const uint64_t moves = track->moves.load(std::memory_order_relaxed);
    if (!finder_.look(track->id, outstanding + queued, moves, now)) continue;
    const PeerState state = track->state.load(std::memory_order_relaxed);
    stalls.push_back({track->name, counted(outstanding, "work request") + " under way and " +
                                       counted(queued, "operation") + " waiting for peer '" + track->name + "' (pid " +
                                       std::to_string(track->pid) + ", " + track->transport + ", " +
                                       peer_state_name(state) + ") have not moved for " +
                                       seconds_text(finder_.still_ns(track->id, now)) +
                                       (stats.worker_rounds == rounds_before_ ? "; nobody drives the engine" : "")});
  }
  if (!stalls.empty()) tell(stalls, now);
  rounds_before_ = stats.worker_rounds;
}

// Dump first: adding an event takes a lock.
void Watchdog::tell(const std::vector<Stall>& stalls, int64_t now) {
  const std::string where = dump(stalls, now);
  for (const Stall& stall : stalls)
    core_->add_event({EngineEvent::Kind::kStalled, stall.peer, stall.what + "; " + where});
}

std::string Watchdog::dump(const std::vector<Stall>& stalls, int64_t now) {
  constexpr size_t kToldInFull = 8;  // only the names of further ones
  if (dumps_ > 0 && (dumps_ >= kDumpsMax || now - dumped_ns_ < kDumpPauseNs)) {
    return "no new recording, for " +
           (dumps_ >= kDumpsMax ? "the watchdog of this engine has written " + std::to_string(kDumpsMax)
                                : "the last one is " + seconds_text(now - dumped_ns_) + " old") +
           ": " + dumped_to_;
  }
  std::string reason = "stall: ";
  for (size_t i = 0; i < stalls.size(); ++i) {
    if (i < kToldInFull) {
      reason += (i == 0 ? "" : "; ") + stalls[i].what;
    } else {
      reason += (i == kToldInFull ? "; and of peers '" : "', '") + stalls[i].peer;
    }
  }
  if (stalls.size() > kToldInFull) reason += "'";
  const DumpOutcome outcome = dump_to_directory(*core_, core_->dump_directory(), reason);
  if (!outcome.written()) {
    return std::string("its flight recorder was not written to ") + outcome.path.data() + ": " +
           std::strerror(outcome.error);
  }
  ++dumps_;
  dumped_ns_ = now;
  dumped_to_ = outcome.path.data();
  return "flight recorder: " + dumped_to_;
}

}  // namespace crossrail
