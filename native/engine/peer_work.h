// What waits for a peer.
#pragma once

#include <cstdint>
#include <deque>
#include <string>

#include "engine/heartbeats.h"

namespace crossrail {

class Transfer;

// One transfer's (or one scatter target's) turn to post towards a peer.
struct PostItem {
  Transfer* transfer;
  uint32_t target;  // of scatter and barrier
};

// What waits for a peer. Progress holder.
// Invariant: is_busy exactly when the peer is in EngineCore::busy_.
struct PeerWork {
  std::deque<PostItem> backlog;   // one-sided
  std::deque<PostItem> messages;  // kept apart: a receiver without buffers holds back messages only
  std::deque<PostItem> services;  // of the engines themselves: before all others
  Heartbeat heartbeat;
  bool is_busy = false;
  std::string note;  // why lost or frozen
};

}  // namespace crossrail
