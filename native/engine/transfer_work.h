// The progress holder's state of a transfer.
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

// Recycled transfers keep index arrays of up to this size.
inline constexpr uint64_t kPagesKept = 16384;

struct ScatterTarget {
  RemoteRegionRef dst;   // null for a barrier; kept after completion, like `remote` below
  Peer* peer = nullptr;  // kept by dst, or by the barrier's group
  uint32_t imm = kNoImm;
  uint64_t src_offset = 0;
  uint64_t dst_offset = 0;
  uint64_t length_bytes = 0;
  uint64_t posted_bytes = 0;
  // If verified, or if cut while rails are unordered: slices posted and not retired.
  uint32_t slices_open = 0;
  // One of those failed, or none could be posted: not all of its bytes have arrived.
  bool is_broken = false;

  // Resets what a recycled target must not remember.
  void begin(uint64_t length) {
    length_bytes = length;
    posted_bytes = 0;
    slices_open = 0;
    is_broken = false;
  }
};

// Filled in by the submitting thread before the transfer is queued; owned by the progress holder afterwards. The fields
// of TransferInfo are final once the transfer is complete.
// Invariant: complete when open_items == 0 and retired == posted.
struct alignas(64) TransferWork {
  // The fields that a single write touches come first, in two cache lines: with hundreds of transfers in flight, every
  // further line would miss the L1 cache.
  OpKind kind = OpKind::kWrite;
  Status failure = Status::kDone;
  bool bulk = false;
  bool cut_short = false;    // cancelled while something was not posted, or was taken back
  bool has_plan = false;     // `verify` is set
  bool has_trigger = false;  // begins later; the fields for that are at the end
  uint32_t imm = kNoImm;
  uint32_t rail = kAnyRail;
  uint32_t open_items = 0;  // entries in peers' backlogs
  uint32_t posted = 0;
  uint32_t retired = 0;
  Region* local = nullptr;  // source, or target of a read; held between begin_op and end_op, unless at_once
  // Target, or source of a read. Kept after completion: for messages, and for the transfer's next use, which most
  // likely goes to the same region and then needs no new reference.
  RemoteRegionRef remote;
  uint64_t local_offset = 0;
  uint64_t remote_offset = 0;
  uint64_t length_bytes = 0;               // of the whole transfer
  std::atomic<uint64_t> bytes_retired{0};  // [any] may read it, also while the transfer is pending
  uint32_t pieces = 0;                     // that a contiguous range is cut into; 0: not cut yet
  uint32_t first_rail = 0;
  uint32_t piece = 0;         // next piece to post a slice of
  bool at_once = false;       // being posted by its submitter: nobody else knows of it, and `local` has no begin_op yet
  bool resumed = false;       // cancelled too late (EngineCore::go_on): it ends done, or fails
  uint32_t serial = 0;        // within the engine, for the flight recorder
  bool is_evened = false;     // pieces only: there is one piece, and the immediate travels alone at the end
  uint64_t slice_offset = 0;  // within the pieces
  uint64_t slice_bytes = 0;   // pieces only: length of a slice
  PeerRef receiver;           // for a send; kept after completion, for messages

  // paged
  std::unique_ptr<uint32_t[]> local_pages;
  std::unique_ptr<uint32_t[]> remote_pages;
  uint64_t page_capacity = 0;  // of both arrays, kept when the transfer is recycled
  uint64_t storage_bytes = 0;  // once recycled: room in the two arrays and in `payload`
  uint64_t page_count = 0;
  uint64_t page_bytes = 0;
  uint64_t local_stride_bytes = 0;
  uint64_t remote_stride_bytes = 0;
  uint64_t page = 0;  // next page

  // For a cancelled write of several pieces: how much of each piece is posted and not taken back. Empty: not cancelled.
  std::vector<uint64_t> kept_bytes;

  // scatter, barrier
  std::vector<ScatterTarget> targets;
  uint64_t targets_total = 0;  // for messages; `targets` may be dropped at completion
  PeerGroupRef group;          // of a barrier

  std::vector<uint8_t> payload;  // send, service
  uint64_t service_token = 0;    // service: chosen by the sender

  std::unique_ptr<VerifyPlan> verify;  // for a checked write; holds `imm`

  // If it has a trigger:
  Ref<Watcher> trigger;  // until the holder has processed it
  uint64_t threshold = 0;
  std::atomic<int64_t> triggered_ns{kNoTrigger};  // [any] reads it
  int64_t ended_ns = kNoTrigger;                  // published with the status

  // If it failed:
  std::shared_ptr<const Address> failed_peer;
  std::string detail;

  // For operations with a single peer.
  Peer& peer() const { return kind == OpKind::kSend || kind == OpKind::kService ? *receiver : *remote->peer(); }
  void set_remote(RemoteRegion* region) {
    if (remote.get() != region) remote = RemoteRegionRef::share(region);
  }
  // Requested by its owner, or by whoever closes a region that it uses.
  bool is_to_be_cancelled(const Transfer& transfer) const {
    return transfer.is_cancel_requested() || (local != nullptr && local->cancels_ops());
  }
  // For a scatter. tag: 0, or 1 + the index of the target that counts its slices.
  void slices_retired(uint32_t tag, uint32_t count, Status status) {
    if (tag == 0) return;
    targets[tag - 1].slices_open -= count;
    if (status != Status::kDone) targets[tag - 1].is_broken = true;
  }
  // Prepares it for the next transfer; keeps allocated storage.
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
