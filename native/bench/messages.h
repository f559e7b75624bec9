// The measured loops of messages: submit_send and a receive pool, with no Python inside the clock.
//
// For engines of Polling::kManual: the loop's thread drives them. Threads, times and failures: as in loops.h.
#pragma once

#include <cstdint>

#include "bench/guard.h"
#include "engine/engine.h"

namespace crossrail::bench {

// Both loops run at both ends, with the same numbers. The pool must have more buffers than `window`.
struct MessageLoop {
  Peer* peer = nullptr;
  ReceivePool* pool = nullptr;
  uint64_t message_bytes = 0;
  uint64_t count = 0;
  uint32_t window = 1;
};

// The sender sends `count` messages, `window` of them in flight; the receiver takes all of them, checks their lengths
// and answers with one. With `verify`, every byte of message i is i, and the receiver checks it.
int64_t run_messages(Engine& engine, const MessageLoop& loop, bool sender, bool verify, Guard& guard);

// `count` round trips of one message. With `verify`, as above, at both ends.
int64_t run_message_ping_pong(Engine& engine, const MessageLoop& loop, bool first, bool verify, Guard& guard);

}  // namespace crossrail::bench
