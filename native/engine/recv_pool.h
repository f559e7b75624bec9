// Two-sided messages: a bounded pool of receive buffers of one engine.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "engine/notifier.h"
#include "engine/waiting.h"
#include "transport/descriptor.h"
#include "util/clock.h"
#include "util/spinlock.h"

namespace crossrail {

class Engine;

struct Message {
  std::shared_ptr<const Address> sender;
  Bytes payload;
};

// Invariant: ready_.size() <= buffer_count_: a message is taken from a peer only while a buffer is free, so an
// exhausted pool holds the senders back and loses nothing.
// Threads: everything from any thread; offer() from the progress holder.
class ReceivePool : public RefCounted<ReceivePool> {
 public:
  ReceivePool(Ref<Engine> engine, uint32_t buffer_count, uint32_t buffer_bytes);
  ~ReceivePool();

  uint32_t buffer_bytes() const { return buffer_bytes_; }
  uint32_t buffer_count() const { return buffer_count_; }

  // Takes up to `limit` messages, oldest first, and appends them to `out`; frees their buffers. Never blocks.
  void poll(size_t limit, std::vector<Message>* out);
  // Blocks until at least one message is there (without taking it) or the deadline has passed.
  WaitResult wait(Deadline deadline, const InterruptCheck& interrupted);
  // Posts `cookie` once, when messages are there (at once if they already are) or the engine closes. Re-arm after
  // draining.
  void notify(Notifier* notifier, uint64_t cookie);
  // Stops receiving into this pool; messages already in it can still be polled. Idempotent.
  void close();
  bool closed() const;
  const Clock& clock() const;  // the clock of wait()'s deadlines

  // Progress holder.
  enum class Offer : uint8_t { kTaken, kFull, kTooLong, kClosed };
  Offer offer(const std::shared_ptr<const Address>& sender, std::span<const uint8_t> payload);

 private:
  void wake_locked();

  const Ref<Engine> engine_;
  const uint32_t buffer_count_;
  const uint32_t buffer_bytes_;
  mutable SpinLock lock_;
  std::deque<Message> ready_;
  bool closed_ = false;
  bool starved_ = false;  // a sender was held back since the last poll
  Ref<Notifier> notifier_;
  uint64_t cookie_ = 0;
  std::atomic<uint32_t> futex_{0};
  std::atomic<uint32_t> sleepers_{0};
};

// The pool that takes an engine's messages, if any. Threads: any, except where it says progress holder.
class PoolSlot {
 public:
  // False after end(). Throws UsageError while another pool is here.
  bool put(const Ref<ReceivePool>& pool);
  // Does nothing unless it is that pool.
  void remove(const ReceivePool* pool);
  // Takes the pool out; none can be put here any more.
  Ref<ReceivePool> end();

  // Progress holder. Null: none. Valid until the next call.
  ReceivePool* current();
  void drop_current() { current_ = nullptr; }

 private:
  std::mutex mutex_;  // guards pool_ and has_ended_
  Ref<ReceivePool> pool_;
  bool has_ended_ = false;
  std::atomic<uint64_t> version_{0};  // changes whenever pool_ does, so that the progress holder rarely needs the mutex
  // Progress holder: a copy of pool_, as of that version.
  Ref<ReceivePool> current_;
  uint64_t version_seen_ = 0;
};

}  // namespace crossrail
