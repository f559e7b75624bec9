#include "bench/messages.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "bench/window.h"
#include "util/clock.h"
#include "util/errors.h"

namespace crossrail::bench {
namespace {

constexpr size_t kTakenAtOnce = 64;

// The messages of one loop, in the order in which they are sent.
class Outgoing {
 public:
  Outgoing(const MessageLoop& loop, bool verify) : peer_(*loop.peer), payload_(loop.message_bytes), verify_(verify) {}
  TransferRef send(Engine& engine, uint64_t index) {
    if (verify_) std::memset(payload_.data(), static_cast<uint8_t>(index), payload_.size());
    return engine.submit_send(peer_, payload_);
  }

 private:
  Peer& peer_;
  std::vector<uint8_t> payload_;
  const bool verify_;
};

// Takes messages from the pool and checks each. Messages may overtake each other, so verification needs them one by
// one.
class Incoming {
 public:
  Incoming(Engine& engine, const MessageLoop& loop, bool verify, Guard& guard)
      : engine_(engine), pool_(*loop.pool), length_bytes_(loop.message_bytes), verify_(verify), guard_(guard) {}

  // At least one, at most kTakenAtOnce.
  size_t take_some(uint64_t index) {
    taken_.clear();
    while (taken_.empty()) {
      engine_.progress();
      pool_.poll(verify_ ? 1 : kTakenAtOnce, &taken_);
      guard_.tick();
    }
    for (const Message& message : taken_) check(message, index);
    return taken_.size();
  }

 private:
  void check(const Message& message, uint64_t index) const {
    const Bytes& payload = message.payload;
    const auto expected = static_cast<uint8_t>(index);
    const bool is_whole = payload.size() == length_bytes_;
    if (is_whole && (!verify_ || std::ranges::all_of(payload, [expected](uint8_t byte) { return byte == expected; }))) {
      return;
    }
    throw TransportError("bench", 0, "message " + std::to_string(index) + " is not what was sent");
  }

  Engine& engine_;
  ReceivePool& pool_;
  const uint64_t length_bytes_;
  const bool verify_;
  Guard& guard_;
  std::vector<Message> taken_;
};

}  // namespace

int64_t run_messages(Engine& engine, const MessageLoop& loop, bool sender, bool verify, Guard& guard) {
  Outgoing out(loop, verify);
  Incoming in(engine, loop, verify, guard);
  Window window(engine, verify ? 1 : loop.window, guard);
  const int64_t start_ns = now_ns();
  if (sender) {
    for (uint64_t i = 0; i < loop.count; ++i) {
      window.make_room();
      window.add(out.send(engine, i));
    }
    window.settle_all();
    in.take_some(loop.count);
  } else {
    for (uint64_t taken = 0; taken < loop.count;) taken += in.take_some(taken);
    settle(engine, out.send(engine, loop.count), guard);
  }
  return now_ns() - start_ns;
}

int64_t run_message_ping_pong(Engine& engine, const MessageLoop& loop, bool first, bool verify, Guard& guard) {
  Outgoing out(loop, verify);
  Incoming in(engine, loop, verify, guard);
  TransferRef sent;
  const int64_t start_ns = now_ns();
  for (uint64_t round = 0; round < loop.count; ++round) {
    if (!first) in.take_some(round);
    sent = out.send(engine, round);
    if (first) in.take_some(round);
  }
  settle(engine, sent, guard);
  return now_ns() - start_ns;
}

}  // namespace crossrail::bench
