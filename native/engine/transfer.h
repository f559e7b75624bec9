// One accepted submit, from submit to its single completion.
//
// Lifecycle: 1. made by Engine::submit_* (kPending). 2. the progress holder posts its pieces. 3. every posted piece has
// retired (done, failed, or flushed). 4. completes exactly once: status, wake-ups, notifications, in this order.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "engine/notifier.h"
#include "engine/waiting.h"
#include "transport/types.h"
#include "util/clock.h"

namespace crossrail {

struct Address;
class Engine;
class EngineCore;
class TransferPool;
struct TransferWork;  // what the progress holder knows of it, in engine/transfer_work.h

enum class OpKind : uint8_t { kWrite, kRead, kPagedWrites, kScatter, kBarrier, kSend, kService };
const char* op_kind_name(OpKind kind);

// Stand-ins for a time: the transfer has no trigger; it has one and waits for it.
inline constexpr int64_t kNoTrigger = 0;
inline constexpr int64_t kUntriggered = -1;

// Everything an error message needs.
struct TransferInfo {
  OpKind kind;
  Status status;
  std::string peer;                            // name of the peer, of the failing one for scatter/barrier
  uint64_t bytes;                              // requested
  uint64_t bytes_retired;                      // the part of these known to have moved
  uint32_t imm;                                // or kNoImm; also kNoImm for a scatter with an immediate per target
  uint64_t region_id;                          // at the peer; 0: none, or several
  uint64_t offset;                             // where the first byte, or page 0, is in that region
  uint64_t sum_sent;                           // for kChecksumMismatch: checksum of what was sent,
  uint64_t sum_found;                          // and of what is in the target's memory
  std::string detail;                          // more about a failure, may be empty
  int64_t triggered_ns;                        // when it began, by the engine's clock; or one of the constants above
  int64_t ended_ns;                            // when it completed, likewise; kNoTrigger while pending
  std::shared_ptr<const Address> failed_peer;  // of a failure: the address of `peer`; null if there is none
};

// Threads: everything here from any thread.
class alignas(64) Transfer {
 public:
  bool done() const { return status() != Status::kPending; }
  // acquire: pairs with the release store at completion, so that what the transfer read may be reused.
  Status status() const { return static_cast<Status>(word_.load(std::memory_order_acquire) & kStatusMask); }

  // Blocks until complete. Drives the engine meanwhile if no worker does.
  WaitResult wait(Deadline deadline, const InterruptCheck& interrupted);

  // Asks for cancellation and returns at once. The transfer completes as kCancelled once no piece of it can access
  // memory any more, or with another status if it ended that way first. False: it was already complete.
  // Counts stay whole. A cancelled write is not counted at all; each target of a scatter or barrier, and each page of a
  // paged write, counts 1 or nothing. A write of which the receiver has already counted a part runs to its end, kDone.
  bool cancel();

  bool is_cancel_requested() const { return cancel_requested_.load(std::memory_order_acquire); }

  // Posts `cookie` to `notifier` once at completion, after the cookies of earlier calls. False (nothing will be posted)
  // if already complete. For calls that race with the completion, the order is not promised.
  bool notify(Notifier* notifier, uint64_t cookie);

  TransferInfo info() const;
  const Clock& clock() const;  // the clock of wait()'s deadlines

  // relaxed: whoever adds a reference already holds one.
  void add_ref() { word_.fetch_add(kOneRef, std::memory_order_relaxed); }
  void release();

 private:
  friend class EngineCore;
  friend class TransferPool;
  struct Listener {
    Listener* next;
    Ref<Notifier> notifier;
    uint64_t cookie;
  };
  // word_: status, two flags, then the reference count. One word, so that completing and dropping the engine's
  // reference are one atomic operation; also the futex of blocked waiters.
  static constexpr uint32_t kStatusMask = 0xff;
  static constexpr uint32_t kHasSleeper = 0x100;   // some thread sleeps on the word
  static constexpr uint32_t kHasListener = 0x200;  // listeners_ is not empty, or about to be
  static constexpr uint32_t kOneRef = 0x1000;

  explicit Transfer(EngineCore* core);
  ~Transfer();
  // Progress holder: the single completion. Drops the engine's reference.
  void complete(Status status);
  // The same while only its submitter knows the transfer.
  void complete_unseen(Status status) {
    word_.store(kOneRef | static_cast<uint32_t>(status), std::memory_order_relaxed);
  }
  // Posts the cookies of a stack of listeners, oldest first.
  void tell_listeners(Listener* latest);

  EngineCore* const core_;  // outlives the transfer: the pool keeps the engine alive while transfers are out
  const std::unique_ptr<TransferWork> work_;
  Transfer* next_free_ = nullptr;
  std::atomic<uint32_t> word_{0};
  std::atomic<bool> cancel_requested_{false};
  // Stack of listeners. notify() sets kHasListener, pushes, then checks the status; complete() stores the status, then
  // checks this stack if the flag was set. Whoever takes the stack notifies everybody on it.
  std::atomic<Listener*> listeners_{nullptr};
};

using TransferRef = Ref<Transfer>;

}  // namespace crossrail
