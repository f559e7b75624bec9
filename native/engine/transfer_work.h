// What the progress holder knows of a transfer.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "engine/transfer.h"
#include "engine/verification.h"

namespace crossrail {

// Recycled transfers keep index arrays up to this size.
inline constexpr uint64_t kPagesKept = 16384;

struct ScatterTarget {
  RemoteRegionRef dst;   // null for a barrier; kept after completion, as `remote` below
  Peer* peer = nullptr;  // kept by dst, or by the barrier's group
  uint32_t imm = kNoImm;
  uint64_t src_offset = 0;
  uint64_t dst_offset = 0;
  uint64_t length_bytes = 0;
  uint64_t posted_bytes = 0;
  // Of one that is verified, or cut where rails have no order: slices posted and not retired.
  uint32_t slices_open = 0;
  // One of those failed, or none could be posted: its bytes are not all there.
  bool is_broken = false;

  // What a recycled one has to forget.
  void begin(uint64_t length) {
    length_bytes = length;
    posted_bytes = 0;
    slices_open = 0;
    is_broken = false;
  }
};

// Filled by the submitting thread before the transfer is queued; afterwards the progress holder's alone. The fields of
// TransferInfo are final once the transfer is complete.
// Invariant: complete when open_items == 0 and retired == posted.
struct alignas(64) TransferWork {
  // What a single write touches comes first, in two cache lines: with hundreds of transfers in flight every further
  // line would be a miss in the first-level cache.
  OpKind kind = OpKind::kWrite;
  Status failure = Status::kDone;
  bool bulk = false;
  bool cut_short = false;    // cancelled with something left unposted, or taken back
  bool has_plan = false;     // `verify` is set
  bool has_trigger = false;  // and begins later: what is of that is far behind
  uint32_t imm = kNoImm;
  uint32_t rail = kAnyRail;
  uint32_t open_items = 0;  // entries in peers' backlogs
  uint32_t posted = 0;
  uint32_t retired = 0;
  Region* local = nullptr;  // source, or target of a read; between begin_op and end_op, unless at_once
  RemoteRegionRef remote;   // target, or source of a read; kept after completion: for messages, and for the next
                            // transfer, which most likely goes to the same and then needs no reference of its own
  uint64_t local_offset = 0;
  uint64_t remote_offset = 0;
  uint64_t length_bytes = 0;               // in all
  std::atomic<uint64_t> bytes_retired{0};  // [any] reads it, also while the transfer is pending
  uint32_t pieces = 0;                     // of a contiguous range; 0: not cut yet
  uint32_t first_rail = 0;
  uint32_t piece = 0;         // next piece to post a slice of
  bool at_once = false;       // being posted by its submitter: nobody else knows of it, `local` has no begin_op yet
  bool resumed = false;       // cancelled too late, see EngineCore::go_on: ends done, or fails
  uint32_t serial = 0;        // of the engine, for the flight recorder
  bool is_evened = false;     // with pieces: one piece, and the immediate goes alone, at the end
  uint64_t slice_offset = 0;  // within the pieces
  uint64_t slice_bytes = 0;   // with pieces: how long slices are
  PeerRef receiver;           // of a send; kept after completion, for messages

  // paged
  std::unique_ptr<uint32_t[]> local_pages;
  std::unique_ptr<uint32_t[]> remote_pages;
  uint64_t page_capacity = 0;  // of the two arrays, kept when the transfer is recycled
  uint64_t storage_bytes = 0;  // once recycled: room in the two arrays and in `payload`
  uint64_t page_count = 0;
  uint64_t page_bytes = 0;
  uint64_t local_stride_bytes = 0;
  uint64_t remote_stride_bytes = 0;
  uint64_t page = 0;  // next page

  // Of a cancelled write of several pieces: how much of each is posted and not taken back. Empty: not cancelled.
  std::vector<uint64_t> kept_bytes;

  // scatter, barrier
  std::vector<ScatterTarget> targets;
  uint64_t targets_total = 0;  // for messages; `targets` may be dropped at completion
  PeerGroupRef group;          // of a barrier

  std::vector<uint8_t> payload;  // send, service
  uint64_t service_token = 0;    // service: the sender's

  std::unique_ptr<VerifyPlan> verify;  // of a checked write: `imm` is in it

  // With a trigger.
  Ref<Watcher> trigger;  // until the holder has seen to it
  uint64_t threshold = 0;
  std::atomic<int64_t> triggered_ns{kNoTrigger};  // [any] reads it
  int64_t ended_ns = kNoTrigger;                  // published with the status

  // of a failure
  std::shared_ptr<const Address> failed_peer;
  std::string detail;

  // Of single-peer operations.
  Peer& peer() const { return kind == OpKind::kSend || kind == OpKind::kService ? *receiver : *remote->peer(); }
  void set_remote(RemoteRegion* region) {
    if (remote.get() != region) remote = RemoteRegionRef::share(region);
  }
  // Asked for by its owner, or by who closes the region it uses.
  bool is_to_be_cancelled(const Transfer& transfer) const {
    return transfer.is_cancel_requested() || (local != nullptr && local->cancels_ops());
  }
  // Of a scatter. tag: 0, or 1 + the target that counts its slices.
  void slices_retired(uint32_t tag, uint32_t count, Status status) {
    if (tag == 0) return;
    targets[tag - 1].slices_open -= count;
    if (status != Status::kDone) targets[tag - 1].is_broken = true;
  }
  // Ready for the next transfer; keeps storage.
  void recycle();
  struct Storage {
    std::unique_ptr<uint32_t[]> local_pages;
    std::unique_ptr<uint32_t[]> remote_pages;
    std::vector<uint8_t> payload;
  };
  Storage take_storage();  // leaves none
  void note_storage();
};

}  // namespace crossrail
