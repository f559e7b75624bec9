// Finds out whether peers are still alive, idle ones included: EngineOptions::heartbeat_ns.
//
// A heartbeat is an empty service message. The transport reports when the peer's engine has taken it, so the time until
// then is a round trip through both engines. At most one per peer is in flight.
//   answered within an interval            connected
//   an interval without an answer          slow
//   kFrozenAfter intervals without one     frozen: its kernel or network accepts what we send, its process does not run
//   lost                                   decided by the transport, which an unanswered heartbeat prompts to check
#pragma once

#include <cstdint>

#include "util/clock.h"

namespace crossrail {

class EngineCore;
class Peer;
enum class Status : uint8_t;

// State of one peer's heartbeats. Progress holder.
struct Heartbeat {
  int64_t sent_ns = 0;  // of the one in flight; 0: none
  int64_t next_ns = 0;  // when the next one is due
  uint64_t answered = 0;
  int64_t rtt_ns = 0;  // of the last answer
  int64_t rtt_smooth_ns = 0;
  int64_t rtt_min_ns = 0;
  int64_t rtt_max_ns = 0;
};

// Threads: progress holder.
class Heartbeats {
 public:
  Heartbeats(EngineCore* core, int64_t interval_ns) : core_(core), interval_ns_(interval_ns) {}

  bool is_on() const { return interval_ns_ > 0; }
  // When tend() wants to be called; kNoDeadline when off.
  Deadline next_timer() const { return is_on() ? due_ns_ : kNoDeadline; }
  // Sends the heartbeats that are due, and reports peers that have not answered.
  void tend(int64_t now);
  // The heartbeat in flight has ended.
  void on_ended(Peer& peer, Status status);

 private:
  static constexpr int64_t kFrozenAfter = 3;
  void tend_peer(Peer& peer, int64_t now);

  EngineCore* const core_;
  const int64_t interval_ns_;
  int64_t due_ns_ = 0;
  int64_t tended_ns_ = 0;
};

}  // namespace crossrail
