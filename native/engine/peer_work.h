// What is queued for a peer.
#pragma once

#include <cstdint>
#include <string>

#include "engine/heartbeats.h"
#include "util/ring_queue.h"

namespace crossrail {

class Transfer;

// One transfer's (or one scatter target's) turn to post towards a peer.
struct PostItem {
  Transfer* transfer;
  uint32_t target;  // for scatter and barrier
};

// A work request whose latency is measured. At most one per peer, and only if nothing else of its transfer was in
// flight when it was posted. The next request of that transfer that ends is taken for it; as nothing is ordered, that
// may be a later slice. In bursts up to three are skipped, by turns, between two measurements; otherwise always the
// first would be chosen, which takes the same rail each time.
struct TimedWork {
  const Transfer* transfer = nullptr;  // null: none
  int64_t since_ns = 0;
  uint32_t rail = 0;  // if the engine chose it
  uint8_t passed = 0;
  uint8_t to_pass = 0;
  bool in_burst = false;  // others were posted meanwhile
};

// What is queued for a peer. Progress holder.
// Invariant: is_busy exactly when the peer is in EngineCore::busy_.
struct PeerWork {
  RingQueue<PostItem> backlog;   // one-sided
  RingQueue<PostItem> shorts;    // likewise, up to kShortBytesMax: so as not to wait behind long ones
  RingQueue<PostItem> messages;  // kept apart: a receiver without buffers holds back messages only
  RingQueue<PostItem> services;  // from the engines themselves: before all others
  Heartbeat heartbeat;
  TimedWork timed;
  bool is_busy = false;
  bool is_told_lost = false;          // an event has reported it: no other does until there has been a link again
  bool is_worth_another_try = false;  // lost because this side lacked resources: the next operation reconnects
  std::string note;                   // why lost or frozen

  // Nothing is queued: gives back the memory of long queues. Only another such burst makes them grow again.
  void end_busy() {
    constexpr size_t kKeptMax = 256;
    is_busy = false;
    for (auto* queue : {&backlog, &shorts, &messages, &services}) {
      if (queue->capacity() > kKeptMax) queue->release();
    }
  }
};

}  // namespace crossrail
