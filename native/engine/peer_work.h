// What waits for a peer.
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
  uint32_t target;  // of scatter and barrier
};

// A work request whose latency is measured. At most one per peer, and only if nothing else of its transfer was in
// flight when it was posted. The next request of that transfer that ends is taken for it; as nothing is ordered, that
// may be a later slice. In bursts up to three are skipped, in turn, between two measurements; otherwise the first would
// always be chosen, which takes the same rail each time.
struct TimedWork {
  const Transfer* transfer = nullptr;  // null: none
  int64_t since_ns = 0;
  uint32_t rail = 0;  // where the engine chose it
  uint8_t passed = 0;
  uint8_t to_pass = 0;
  bool in_burst = false;  // others were posted meanwhile
};

// What waits for a peer. Progress holder.
// Invariant: is_busy exactly when the peer is in EngineCore::busy_.
struct PeerWork {
  RingQueue<PostItem> backlog;   // one-sided
  RingQueue<PostItem> shorts;    // likewise, up to kShortBytesMax: not behind all that is long
  RingQueue<PostItem> messages;  // kept apart: a receiver without buffers holds back messages only
  RingQueue<PostItem> services;  // of the engines themselves: before all others
  Heartbeat heartbeat;
  TimedWork timed;
  bool is_busy = false;
  bool is_told_lost = false;          // an event has said so: none does again before there has been a link once more
  bool is_worth_another_try = false;  // it is lost for want of something here: the next operation connects anew
  std::string note;                   // why lost or frozen

  // Nothing waits: memory of a long queue is given back. What grows it again is a burst as long.
  void end_busy() {
    constexpr size_t kKeptMax = 256;
    is_busy = false;
    for (auto* queue : {&backlog, &shorts, &messages, &services}) {
      if (queue->capacity() > kKeptMax) queue->release();
    }
  }
};

}  // namespace crossrail
