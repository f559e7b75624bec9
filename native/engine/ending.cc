// How transfers end: works retired or taken back, failures, cancels, the single completion.
#include <algorithm>

#include "engine/core.h"
#include "engine/sharding.h"
#include "util/mutation.h"

namespace crossrail {

namespace {
constexpr size_t kTargetsKept = 128;
}

void EngineCore::on_retired(Link& link, void* context, uint32_t tag, uint32_t count, uint64_t bytes, Status status,
                            const std::string& detail) {
  assert_holder();
  auto* transfer = static_cast<Transfer*>(context);
  TransferWork& work = *transfer->work_;
  if (is_mutated_now(Mutation::kForgetCompletion, 100)) return;
  Peer& peer = *static_cast<Peer*>(link.user);
  note_retired(peer, count);
  end_timing(peer, kAnyRail, transfer, status == Status::kDone);
  if (!peer.route_.traits->balances_rails) record_works(FlightState::kRetired, peer, kAnyRail, *transfer, count, bytes);
  work.retired += count;
  if (work.kind == OpKind::kScatter) work.slices_retired(tag, count, status);
  if (status == Status::kDone) bump(work.bytes_retired, bytes);
  if (status != Status::kDone) fail(transfer, status, peer, detail);
  if (status == Status::kDone && work.kind == OpKind::kRead && work.local->needs_flush_) [[unlikely]] {
    if (!flush_gpus(uint64_t{1} << work.local->gpu(), "a read"))
      fail(transfer, Status::kTransportFailed, peer, "what was read does not become visible to the GPU");
  }
  finish_if_done(transfer);
}

// The rest of the transfer was cut off (scan_cancels), or all of it is posted: nothing is posted until we know what is
// left.
void EngineCore::on_withdrawn(Link& link, void* context, uint32_t tag, uint64_t bytes) {
  assert_holder();
  auto* transfer = static_cast<Transfer*>(context);
  TransferWork& work = *transfer->work_;
  Peer& peer = *static_cast<Peer*>(link.user);
  note_retired(peer, 1);
  end_timing(peer, kAnyRail, transfer, false);
  record_works(FlightState::kWithdrawn, peer, kAnyRail, *transfer, 1, bytes);
  ++work.retired;
  work.cut_short = true;
  if (work.kind == OpKind::kWrite && work.pieces > 1) {
    note_kept(work);
    work.kept_bytes[tag] -= std::min(bytes, work.kept_bytes[tag]);
  }
  finish_if_done(transfer);
}

// Called before anything is taken back: until then everything posted is kept, up to the cursor.
void EngineCore::note_kept(TransferWork& work) {
  if (!work.kept_bytes.empty()) return;
  work.kept_bytes.resize(work.pieces);
  for (uint32_t piece = 0; piece < work.pieces; ++piece) {
    const uint64_t length = piece_of(work.length_bytes, work.pieces, piece, kCutAlign).length_bytes;
    const uint64_t posted = work.slice_offset + (piece < work.piece ? work.slice_bytes : 0);
    work.kept_bytes[piece] = std::min(length, posted);
  }
}

// Whether the receiver has counted some but not all shares of a cut transfer's count: some pieces were posted
// completely and not taken back. Operations without pieces count in single work requests and cannot end this way.
bool EngineCore::is_partly_counted(TransferWork& work) {
  if (work.kind != OpKind::kWrite || work.imm == kNoImm || work.pieces == 1) return false;
  if (is_mutated(Mutation::kCancelLeavesShare)) return false;
  note_kept(work);
  for (uint32_t piece = 0; piece < work.pieces; ++piece) {
    if (work.kept_bytes[piece] == piece_of(work.length_bytes, work.pieces, piece, kCutAlign).length_bytes) return true;
  }
  return false;
}

// A fraction of a count must not stay with the receiver, where it would add up with others to a count that never was:
// the cancel came too late, and what is missing is posted (again).
void EngineCore::go_on(Transfer* transfer) {
  assert_holder();
  TransferWork& work = *transfer->work_;
  Peer& peer = work.peer();
  if (closed()) {
    fail(transfer, Status::kEngineClosed, peer, "the engine was closed");
  } else if (peer.state() == PeerState::kLost) {
    fail(transfer, Status::kPeerLost, peer, peer.work_->note);
  }
  if (work.failure != Status::kDone) {
    finish(transfer, work.failure);
    return;
  }
  work.cut_short = false;
  work.resumed = true;
  work.piece = 0;
  work.slice_offset = 0;
  work.open_items = 1;
  // Not at once: the transport that reports this may be in the middle of something.
  peer.work_->backlog.push_back({transfer, 0});
  mark_busy(peer);
  runnable_ = true;
}

void EngineCore::close_item(Transfer* transfer) { --transfer->work_->open_items; }

// The rest of the item will not be posted.
void EngineCore::fail_item(const PostItem& item, Status status, const Peer& peer, const std::string& detail) {
  assert_holder();
  TransferWork& work = *item.transfer->work_;
  if (work.kind == OpKind::kScatter) work.targets[item.target].is_broken = true;
  fail(item.transfer, status, peer, detail);
  close_item(item.transfer);
}

// Records the first failure. The transfer completes once no part of it is in flight any more.
void EngineCore::fail(Transfer* transfer, Status status, const Peer& peer, const std::string& detail) {
  assert_holder();
  TransferWork& work = *transfer->work_;
  if (work.failure != Status::kDone) return;
  work.failure = status;
  work.failed_peer = peer.shared_address();
  bump(peer.track_->failed);
  work.detail = detail;
}

void EngineCore::finish_if_done(Transfer* transfer) {
  assert_holder();
  TransferWork& work = *transfer->work_;
  if (work.open_items > 0 || work.retired < work.posted || transfer->done()) return;
  if (work.has_plan && work.verify->open > 0) return;
  // The targets of a scatter are independent: those of a healthy peer are counted, whatever became of others.
  const bool may_be_right = work.failure == Status::kDone || work.kind == OpKind::kScatter;
  if (may_be_right && !work.cut_short && work.has_plan && !work.verify->is_asked && verifications_.ask(transfer))
    return;
  if (work.failure != Status::kDone) {
    finish(transfer, work.failure);
  } else if (!work.cut_short) {
    finish(transfer, Status::kDone);
  } else if (is_partly_counted(work)) {
    go_on(transfer);
  } else {
    finish(transfer, Status::kCancelled);
  }
}

void EngineCore::finish(Transfer* transfer, Status status) {
  assert_holder();
  TransferWork& work = *transfer->work_;
  if (work.kind == OpKind::kService) {
    on_service_ended(work, status);
  } else if (status == Status::kDone) {
    bump(counters_.done);
    if (work.kind == OpKind::kRead) {
      bump(counters_.bytes_read, work.length_bytes);
    } else if (work.kind == OpKind::kSend) {
      bump(counters_.sent);
    } else {
      bump(counters_.bytes_written, work.length_bytes);
    }
    work.bytes_retired.store(work.length_bytes, std::memory_order_relaxed);  // published with the status
  } else {
    bump(status == Status::kCancelled ? counters_.cancelled : counters_.failed);
  }
  const bool unseen = std::exchange(work.at_once, false);
  // The works of a transfer that was done at once already tell of it, unless they are too many to be recorded, or there
  // are none.
  if (!unseen || status != Status::kDone || work.targets_total > 0 || work.posted == 0) {
    record_transfer(status == Status::kDone        ? FlightState::kDone
                    : status == Status::kCancelled ? FlightState::kCancelled
                                                   : FlightState::kFailed,
                    *transfer);
  }
  Region* const local = std::exchange(work.local, nullptr);
  if (local != nullptr && !unseen) local->end_op();
  // As with single writes, the targets' regions are kept: the next scatter most likely goes to the same ones and then
  // needs no new references.
  if (work.targets.size() > kTargetsKept) work.targets.clear();
  bump(finished_);
  if (work.has_trigger) work.ended_ns = clock().now_ns();
  if (unseen) {
    transfer->complete_unseen(status);
  } else {
    transfer->complete(status);
  }
}

// Fails transfers that wait for a word: that peer's; null: all.
void EngineCore::fail_triggered(const Peer* peer, Status status, const std::string& detail) {
  assert_holder();
  if (triggers_.empty()) return;
  const auto is_its = [&](const Transfer* transfer) { return peer == nullptr || &transfer->work_->peer() == peer; };
  for (Transfer* transfer : triggers_.take(is_its)) {
    fail(transfer, status, transfer->work_->peer(), detail);
    finish(transfer, status);
  }
}

void EngineCore::fail_backlogs(Peer& peer, Status status, const std::string& detail) {
  assert_holder();
  fail_triggered(&peer, status, detail);
  peer.track_->queued.store(0, std::memory_order_relaxed);
  for (auto* backlog : {&peer.work_->backlog, &peer.work_->shorts, &peer.work_->messages, &peer.work_->services}) {
    const RingQueue<PostItem> items = std::exchange(*backlog, {});
    for (size_t i = 0; i < items.size(); ++i) {
      fail_item(items[i], status, peer, detail);
      finish_if_done(items[i].transfer);
    }
  }
}

// Takes cancelled transfers out of our queues and, as far as the peer has not begun them, out of the transport's. What
// the peer has begun runs to its end. The cancellation is reported only then, which is what makes it safe to act on.
void EngineCore::scan_cancels() {
  assert_holder();
  // acq_rel: pairs with the release in request_cancel_scan. Either we see the request of everybody whose flag we clear,
  // or their flag stays set; a plain store could be reordered with the loads below.
  cancel_scan_.exchange(false, std::memory_order_acq_rel);
  const auto is_cut = [](const Transfer* transfer) {
    return transfer->work_->is_to_be_cancelled(*transfer) && !transfer->work_->resumed;
  };
  for (Transfer* transfer : triggers_.take(is_cut)) finish(transfer, Status::kCancelled);
  for (const PeerRef& peer : busy_) {
    for (auto* backlog : {&peer->work_->backlog, &peer->work_->shorts, &peer->work_->messages}) {
      std::vector<PostItem> cut;
      backlog->filter([&](const PostItem& item) {
        const bool kept = !is_cut(item.transfer);
        if (!kept) cut.push_back(item);
        return kept;
      });
      for (const PostItem& item : cut) {
        item.transfer->work_->cut_short = true;
        close_item(item.transfer);
        if (is_mutated(Mutation::kCancelEarly)) item.transfer->work_->posted = item.transfer->work_->retired;
        finish_if_done(item.transfer);
      }
    }
  }
  // Only transfers that will post nothing more. A request that came after we looked at the queues waits for the next
  // scan: otherwise an immediate whose bytes were taken back might still be posted.
  transports_.withdraw([](void* context) {
    const auto* transfer = static_cast<Transfer*>(context);
    const TransferWork& work = *transfer->work_;
    return (work.open_items == 0 || work.cut_short) && !work.resumed && work.is_to_be_cancelled(*transfer);
  });
}

}  // namespace crossrail
