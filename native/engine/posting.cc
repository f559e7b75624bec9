// From transfers to work requests: which rail, how long, worth how much of a count.
#include <algorithm>

#include "engine/core.h"
#include "engine/sharding.h"
#include "util/errors.h"
#include "util/mutation.h"

namespace crossrail {

namespace {

constexpr uint32_t kSubmitsPerRound = 64;
constexpr uint32_t kBatch = 64;                          // work requests handed to the transport at once
constexpr uint64_t kBytesPerTurn = uint64_t{1} << 20;    // of one transfer before others get a turn
constexpr uint32_t kItemsPerTurn = 256;                  // of one peer in a round,
constexpr uint64_t kBytesPerRound = uint64_t{1} << 20;   // and bytes in all: then arrivals are looked at again.
constexpr uint64_t kQueuedPerRound = uint64_t{4} << 20;  // Where posting only queues: the transport sees to its turns.
constexpr uint32_t kBatchesPerTurn = 8;                  // of one paged transfer
constexpr uint64_t kCutAlign = 4096;                     // pieces begin at multiples: whole pages and lines
// Of a long range over rails that the transport balances: rails that end at different times idle for half of one each.
constexpr uint64_t kSlicesPerRail = 32;

// Largest power of two <= value, value in 1..256: its log2.
constexpr uint32_t floor_log2(uint64_t value) { return 63 - static_cast<uint32_t>(__builtin_clzll(value)); }

// Asked for by its owner, or by who closes the region it uses.
bool is_to_be_cancelled(const Transfer& transfer, const TransferWork& work) {
  return transfer.is_cancel_requested() || (work.local != nullptr && work.local->cancels_ops());
}

}  // namespace

uint32_t EngineCore::take_submits() {
  uint32_t taken = 0;
  Transfer* transfer;
  while (taken < kSubmitsPerRound && submits_.try_pop(&transfer)) {
    start(transfer);
    ++taken;
  }
  if (taken > 0) bump(taken_, taken);
  return taken;
}

void EngineCore::start(Transfer* transfer) {
  TransferWork& work = *transfer->work_;
  work.serial = ++last_serial_;
  if (!work.at_once) record_transfer(FlightState::kSubmitted, *transfer);
  if (closed()) {
    finish(transfer, Status::kEngineClosed);
    return;
  }
  if (is_to_be_cancelled(*transfer, work)) {
    finish(transfer, Status::kCancelled);
    return;
  }
  work.first_rail = work.rail != kAnyRail ? work.rail : next_rail_;
  if (++next_rail_ == transports_.rail_count()) next_rail_ = 0;
  if (work.kind == OpKind::kScatter || work.kind == OpKind::kBarrier) {
    work.open_items = static_cast<uint32_t>(work.targets.size());
    for (uint32_t i = 0; i < work.targets.size(); ++i) start_item(*work.targets[i].peer, transfer, i);
    // A group may be empty, and every target may have been posted and done already.
    finish_if_done(transfer);
    return;
  }
  work.open_items = 1;
  start_item(work.peer(), transfer, 0);
  finish_if_done(transfer);
}

// Posts at once what nothing else is queued before; queues the rest.
void EngineCore::start_item(Peer& peer, Transfer* transfer, uint32_t target) {
  if (peer.link_ == nullptr) start_connect(peer);
  if (peer.state() == PeerState::kLost) {
    fail(transfer, Status::kPeerLost, peer.address().name, peer.work_->note);
    close_item(transfer);
    return;
  }
  const PostItem item{transfer, target};
  PeerWork& waiting = *peer.work_;
  const OpKind kind = transfer->work_->kind;
  auto& backlog = kind == OpKind::kSend      ? waiting.messages
                  : kind == OpKind::kService ? waiting.services
                                             : waiting.backlog;
  if (backlog.empty() && advance(peer, item) == Progress::kAllPosted) {
    close_item(transfer);
    return;
  }
  backlog.push_back(item);
  mark_busy(peer);
  runnable_ = true;
}

void EngineCore::mark_busy(Peer& peer) {
  note_queued(peer);
  if (std::exchange(peer.work_->is_busy, true)) return;
  busy_.push_back(PeerRef::share(&peer));
}

uint32_t EngineCore::post_backlogs() {
  round_bytes_ = 0;
  runnable_ = false;
  if (busy_.empty()) return 0;
  uint32_t moved = 0;
  for (size_t i = 0; i < busy_.size(); ++i) {
    const PeerRef peer = busy_[i];  // posting may lose the peer
    moved += post_backlog(*peer, peer->work_->services);
    moved += post_backlog(*peer, peer->work_->messages);
    moved += post_backlog(*peer, peer->work_->backlog);
  }
  std::erase_if(busy_, [](const PeerRef& peer) {
    note_queued(*peer);
    const PeerWork& work = *peer->work_;
    peer->work_->is_busy = !work.backlog.empty() || !work.messages.empty() || !work.services.empty();
    return !peer->work_->is_busy;
  });
  runnable_ = runnable_ || moved > 0;
  return moved;
}

// One round over a peer's queue, each item a turn; ends when everything that was tried is blocked.
uint32_t EngineCore::post_backlog(Peer& peer, std::deque<PostItem>& backlog) {
  uint32_t moved = 0;
  uint32_t blocked = 0;
  const uint64_t bytes_max = peer.route_.traits->balances_rails ? kQueuedPerRound : kBytesPerRound;
  for (uint32_t turn = 0; turn < kItemsPerTurn && blocked < backlog.size() && round_bytes_ < bytes_max; ++turn) {
    const PostItem item = backlog.front();
    const uint32_t posted_before = item.transfer->work_->posted;
    const Progress progress = advance(peer, item);
    if (backlog.empty()) return moved + 1;  // the link went down meanwhile
    backlog.pop_front();
    if (progress == Progress::kAllPosted) {
      ++moved;
      close_item(item.transfer);
      finish_if_done(item.transfer);
      continue;
    }
    backlog.push_back(item);
    if (item.transfer->work_->posted != posted_before) {
      ++moved;
      blocked = 0;
    } else {
      ++blocked;
    }
    // Messages keep their place: one blocked means the channel is full.
    if (&backlog != &peer.work_->backlog && progress == Progress::kBlocked) {
      backlog.push_front(backlog.back());
      backlog.pop_back();
      break;
    }
  }
  if (moved > 0) bump(peer.track_->moves);
  return moved;
}

EngineCore::Progress EngineCore::advance(Peer& peer, const PostItem& item) {
  TransferWork& work = *item.transfer->work_;
  const bool has_targets = work.kind == OpKind::kScatter || work.kind == OpKind::kBarrier;  // each fails for itself
  if ((work.failure != Status::kDone && !has_targets) || work.cut_short)
    return Progress::kAllPosted;  // post no more of it
  if (peer.link_ == nullptr || peer.state() == PeerState::kConnecting) return Progress::kBlocked;
  switch (work.kind) {
    case OpKind::kWrite:
    case OpKind::kRead:
      return post_range(peer, item.transfer);
    case OpKind::kPagedWrites:
      return post_pages(peer, item.transfer);
    case OpKind::kScatter:
    case OpKind::kBarrier:
      return post_target(peer, item.transfer, work.targets[item.target]);
    case OpKind::kSend:
    case OpKind::kService:
      return post_message(peer, item.transfer);
  }
  return Progress::kAllPosted;
}

// How a contiguous range is cut on its way to this peer. Decided once, when the link is up: lanes may come and go while it
// is being posted, and what was begun one way must not be ended another.
void EngineCore::plan_range(const Peer& peer, TransferWork& work) {
  const Traits& traits = *peer.route_.traits;
  work.pieces = 1;
  work.is_evened = false;
  work.slice_bytes = traits.slice_bytes_max;
  if (work.rail != kAnyRail || work.length_bytes < 2 * traits.piece_bytes_min) return;
  if (!traits.balances_rails) {
    work.pieces = pieces_for(work.length_bytes, traits.rail_count, traits.piece_bytes_min);
    return;
  }
  const uint32_t lanes = peer.link_->lanes();
  if (lanes == 1) return;
  // So long that even a sixteenth of it is too coarse to keep all rails busy to the end: cut finer than a count can be,
  // one piece in many slices, and the immediate follows once all of them are in place.
  work.is_evened = work.length_bytes >= 2 * kRailsMax * traits.piece_bytes_min;
  if (work.is_evened) {
    const uint64_t even = work.length_bytes / (kSlicesPerRail * lanes) / kCutAlign * kCutAlign;
    work.slice_bytes = std::clamp(even, traits.piece_bytes_min, traits.slice_bytes_max);
    return;
  }
  // The transport gives each piece to the rail that is free: more pieces than rails even out rails of different speed.
  work.pieces = pieces_for(work.length_bytes, kRailsMax, traits.piece_bytes_min);
}

// On which rail the piece goes. Rails are counted over all transports; this one may have fewer.
uint32_t EngineCore::rail_for(const Peer& peer, const TransferWork& work, uint32_t piece) {
  const Traits& traits = *peer.route_.traits;
  if (traits.balances_rails && work.rail == kAnyRail) return kAnyRail;
  const uint32_t rail = work.first_rail + piece;
  if (rail < traits.rail_count) return rail;
  const uint32_t wrapped = rail - traits.rail_count;  // nearly always enough, and no division
  return wrapped < traits.rail_count ? wrapped : wrapped % traits.rail_count;
}

// bytes: of all requests.
uint32_t EngineCore::post(Peer& peer, uint32_t rail, std::span<const WorkRequest> requests, uint64_t bytes,
                          Transfer* transfer) {
  TransferWork& work = *transfer->work_;
  uint32_t completed = 0;
  // Counted before: the transport may retire some through the sink while it posts.
  work.posted += static_cast<uint32_t>(requests.size());
  const uint32_t accepted = peer.route_.transport->post(*peer.link_, rail, requests, &completed);
  work.posted -= static_cast<uint32_t>(requests.size()) - accepted;
  work.retired += completed;
  bump(counters_.posted, accepted);
  if (accepted < requests.size()) {
    bump(counters_.retried);
    for (const WorkRequest& request : requests.subspan(accepted)) bytes -= request.length_bytes;
  }
  // Of a scatter whose targets are all done at once finish() makes one entry: one for each would show.
  const bool has_targets = work.kind == OpKind::kScatter || work.kind == OpKind::kBarrier;
  if (accepted == 0 || (accepted == completed && has_targets)) return accepted;
  if (accepted == 1 && completed == 1 && work.at_once && work.posted == 1) {
    const uint32_t op = static_cast<uint32_t>(work.kind) + 1;
    if (!recorder_.repeat(&peer, rail, work.imm, op, bytes)) record_first_moved(peer, rail, bytes, work);
  } else {
    record_posted(peer, rail, accepted, completed, bytes, *transfer);
  }
  return accepted;
}

RemoteKey* EngineCore::key_of(Peer& peer, RemoteRegion& region) {
  if (!region.key_) region.key_ = peer.route_.transport->resolve(*peer.link_, region.descriptor());
  return region.key_.get();
}

// The part of a transfer's range at `offset`, still without immediate and context.
WorkRequest EngineCore::range_request(const Peer& peer, const TransferWork& work, RemoteKey* key, uint64_t offset,
                                      uint64_t length_bytes) {
  WorkRequest request;
  request.op = work.kind == OpKind::kRead ? WorkOp::kRead : WorkOp::kWrite;
  request.bulk = work.bulk;
  request.local = work.local->base() + work.local_offset + offset;
  request.length_bytes = length_bytes;
  request.remote = key;
  request.remote_offset = work.remote_offset + offset;
  request.local_region = work.local->local_.on(peer.route_.index);
  return request;
}

// A range in one piece and one slice: one work request and no bookkeeping.
EngineCore::Progress EngineCore::post_short_range(Peer& peer, Transfer* transfer, RemoteKey* key) {
  TransferWork& work = *transfer->work_;
  WorkRequest request = range_request(peer, work, key, 0, work.length_bytes);
  request.has_imm = work.imm != kNoImm;
  request.wire_imm = request.has_imm ? wire_imm(work.imm, 0) : 0;
  request.context = transfer;
  if (post(peer, rail_for(peer, work, 0), {&request, 1}, work.length_bytes, transfer) == 0) return Progress::kBlocked;
  round_bytes_ += work.length_bytes;
  return Progress::kAllPosted;
}

// A contiguous range: cut into one piece per rail, each piece into slices. The last slice of a piece carries the
// piece's share of the immediate; on rails without order it waits until everything before it is done, and of an evened
// range travels alone, so that nothing but its own way is waited for. Resumed: once more from the start, without what
// was kept.
EngineCore::Progress EngineCore::post_range(Peer& peer, Transfer* transfer) {
  TransferWork& work = *transfer->work_;
  const Traits& traits = *peer.route_.traits;
  RemoteKey* key = key_of(peer, *work.remote);
  if (work.pieces == 0) plan_range(peer, work);
  const uint64_t slice_bytes = work.slice_bytes;
  if (work.pieces == 1 && work.length_bytes <= slice_bytes) return post_short_range(peer, transfer, key);
  const bool imm_alone = work.imm != kNoImm && work.is_evened;
  uint64_t turn_bytes = 0;
  const uint64_t longest =
      work.pieces == 1 ? work.length_bytes : piece_of(work.length_bytes, work.pieces, 0, kCutAlign).length_bytes;
  while (work.slice_offset < longest || work.slice_offset == 0) {
    for (; work.piece < work.pieces; ++work.piece) {
      const Range range = work.pieces == 1 ? Range{0, work.length_bytes}
                                           : piece_of(work.length_bytes, work.pieces, work.piece, kCutAlign);
      if (work.slice_offset >= range.length_bytes && work.slice_offset > 0) continue;
      if (work.resumed && work.slice_offset < work.kept_bytes[work.piece]) continue;
      if (turn_bytes >= kBytesPerTurn) return Progress::kMore;
      const uint64_t length = std::min(range.length_bytes - work.slice_offset, slice_bytes);
      const bool last = work.slice_offset + length == range.length_bytes;
      const bool has_imm = work.imm != kNoImm && last && !imm_alone;
      if (has_imm && !traits.fifo_rails && longest > slice_bytes && work.retired < work.posted &&
          !is_mutated(Mutation::kImmediateBeforeBytes))
        return Progress::kBlocked;
      WorkRequest request = range_request(peer, work, key, range.offset + work.slice_offset, length);
      if (is_mutated(Mutation::kShortPiece) && work.pieces > 1 && last) --request.length_bytes;
      request.has_imm = has_imm;
      request.wire_imm = has_imm ? wire_imm(work.imm, share_code_of_piece(work.pieces, work.piece)) : 0;
      if (is_mutated(Mutation::kCountShareTwice) && work.pieces > 1 && work.piece == 0) {
        request.wire_imm = wire_imm(work.imm, share_code_of_piece(work.pieces / 2, 0));
      }
      request.context = transfer;
      request.tag = work.piece;
      const uint32_t rail = rail_for(peer, work, work.piece);
      const uint32_t retired_before = work.retired;
      if (post(peer, rail, {&request, 1}, length, transfer) == 0) return Progress::kBlocked;
      if (work.retired != retired_before && work.failure == Status::kDone) work.bytes_retired += length;
      if (work.failure != Status::kDone) return Progress::kAllPosted;
      turn_bytes += length;
      round_bytes_ += length;
    }
    work.piece = 0;
    work.slice_offset += slice_bytes;
  }
  if (imm_alone) {
    if (work.retired < work.posted && !is_mutated(Mutation::kImmediateBeforeBytes)) return Progress::kBlocked;
    WorkRequest request = range_request(peer, work, key, work.length_bytes, 0);
    request.has_imm = true;
    request.wire_imm = wire_imm(work.imm, 0);
    request.context = transfer;
    if (post(peer, kAnyRail, {&request, 1}, 0, transfer) == 0) return Progress::kBlocked;
  }
  return Progress::kAllPosted;
}

// Pages: neighbours on both sides travel as one request worth a power of two of counts; batches go round the rails.
EngineCore::Progress EngineCore::post_pages(Peer& peer, Transfer* transfer) {
  TransferWork& work = *transfer->work_;
  RemoteKey* key = key_of(peer, *work.remote);
  const bool can_join = work.local_stride_bytes == work.page_bytes && work.remote_stride_bytes == work.page_bytes;
  const uint64_t fits =
      std::max<uint64_t>(1, peer.route_.traits->slice_bytes_max / std::max<uint64_t>(1, work.page_bytes));
  const uint64_t run_max = can_join ? std::min<uint64_t>(kPagesPerRequestMax, fits) : 1;
  const uint32_t* local_pages = work.local_pages.get();
  const uint32_t* remote_pages = work.remote_pages.get();
  std::byte* const local = work.local->base() + work.local_offset;
  uint64_t turn_bytes = 0;
  std::array<WorkRequest, kBatch> batch;
  for (uint32_t turn = 0; work.page < work.page_count; ++turn) {
    if (turn == kBatchesPerTurn || turn_bytes >= kBytesPerTurn) return Progress::kMore;
    const uint64_t turn_bytes_before = turn_bytes;
    uint32_t filled = 0;
    uint64_t page = work.page;
    for (; filled < kBatch && page < work.page_count && turn_bytes < kBytesPerTurn; ++filled) {
      uint64_t run = 1;
      const uint64_t limit = std::min(run_max, work.page_count - page);
      while (run < limit && local_pages[page + run] == local_pages[page] + run &&
             remote_pages[page + run] == remote_pages[page] + run)
        ++run;
      uint32_t code = 0;
      if (work.imm != kNoImm && run > 1) {
        const uint32_t log2 = floor_log2(run);
        run = uint64_t{1} << log2;
        code = share_code_of_pages(log2);
      }
      WorkRequest& request = batch[filled];
      request.op = WorkOp::kWrite;
      request.has_imm = work.imm != kNoImm;
      request.bulk = work.bulk;
      request.wire_imm = request.has_imm ? wire_imm(work.imm, code) : 0;
      request.local = local + local_pages[page] * work.local_stride_bytes;
      request.length_bytes = run * work.page_bytes;
      request.remote = key;
      request.remote_offset = work.remote_offset + remote_pages[page] * work.remote_stride_bytes;
      request.local_region = work.local->local_.on(peer.route_.index);
      request.context = transfer;
      request.reserved = static_cast<uint32_t>(run);
      if (is_mutated(Mutation::kIgnorePage) && run > 1) request.length_bytes -= work.page_bytes;
      page += run;
      turn_bytes += request.length_bytes;
    }
    const uint32_t retired_before = work.retired;
    const uint32_t accepted =
        post(peer, rail_for(peer, work, 0), {batch.data(), filled}, turn_bytes - turn_bytes_before, transfer);
    const bool at_once = work.retired == retired_before + accepted && work.failure == Status::kDone;
    for (uint32_t i = 0; i < accepted; ++i) {
      work.page += batch[i].reserved;
      round_bytes_ += batch[i].length_bytes;
      if (at_once) work.bytes_retired += batch[i].length_bytes;
    }
    if (work.failure != Status::kDone) return Progress::kAllPosted;
    if (work.rail == kAnyRail && ++work.first_rail >= peer.route_.traits->rail_count) work.first_rail = 0;
    if (accepted < filled) return Progress::kBlocked;
  }
  return Progress::kAllPosted;
}

// One target of a scatter or barrier: on one rail, in slices, the last one with the immediate.
EngineCore::Progress EngineCore::post_target(Peer& peer, Transfer* transfer, ScatterTarget& target) {
  TransferWork& work = *transfer->work_;
  const Traits& traits = *peer.route_.traits;
  const auto index = static_cast<uint32_t>(&target - work.targets.data());
  const uint32_t rail = rail_for(peer, work, index);
  RemoteKey* key = target.dst ? key_of(peer, *target.dst) : nullptr;
  uint64_t turn_bytes = 0;
  do {
    if (turn_bytes >= kBytesPerTurn) return Progress::kMore;
    const uint64_t length = std::min(target.length_bytes - target.posted_bytes, traits.slice_bytes_max);
    const bool has_imm = work.imm != kNoImm && target.posted_bytes + length == target.length_bytes;
    if (has_imm && !traits.fifo_rails && target.length_bytes > traits.slice_bytes_max && work.retired < work.posted)
      return Progress::kBlocked;
    WorkRequest request;
    request.op = WorkOp::kWrite;
    request.has_imm = has_imm;
    request.bulk = work.bulk;
    request.wire_imm = has_imm ? wire_imm(work.imm, 0) : 0;
    request.local = work.local ? work.local->base() + target.src_offset + target.posted_bytes : nullptr;
    request.length_bytes = length;
    request.remote = key;
    request.remote_offset = target.dst_offset + target.posted_bytes;
    request.local_region = work.local ? work.local->local_.on(peer.route_.index) : nullptr;
    request.context = transfer;
    const uint32_t retired_before = work.retired;
    if (post(peer, rail, {&request, 1}, length, transfer) == 0) return Progress::kBlocked;
    if (work.retired != retired_before && work.failure == Status::kDone) work.bytes_retired += length;
    target.posted_bytes += length;
    turn_bytes += length;
    round_bytes_ += length;
  } while (target.posted_bytes < target.length_bytes);
  return Progress::kAllPosted;
}

EngineCore::Progress EngineCore::post_message(Peer& peer, Transfer* transfer) {
  TransferWork& work = *transfer->work_;
  WorkRequest request;
  request.op = work.kind == OpKind::kService ? WorkOp::kService : WorkOp::kSend;
  request.local = reinterpret_cast<std::byte*>(work.payload.data());
  request.length_bytes = work.payload.size();
  request.context = transfer;
  const uint32_t rail = peer.route_.traits->balances_rails ? kAnyRail : 0;
  if (post(peer, rail, {&request, 1}, request.length_bytes, transfer) == 0) return Progress::kBlocked;
  return Progress::kAllPosted;
}

// --- ends ---

void EngineCore::on_retired(Link& link, void* context, uint32_t count, uint64_t bytes, Status status,
                            const std::string& detail) {
  auto* transfer = static_cast<Transfer*>(context);
  TransferWork& work = *transfer->work_;
  if (is_mutated_now(Mutation::kForgetCompletion, 100)) return;
  Peer& peer = *static_cast<Peer*>(link.user);
  note_retired(peer, count);
  if (!peer.route_.traits->balances_rails) record_works(FlightState::kRetired, peer, kAnyRail, *transfer, count, bytes);
  work.retired += count;
  if (status == Status::kDone) work.bytes_retired += bytes;
  if (status != Status::kDone) fail(transfer, status, peer.address().name, detail);
  finish_if_done(transfer);
}

// The transfer's item was cut before (scan_cancels), or all of it posted: nothing is posted until we know what is left.
void EngineCore::on_withdrawn(Link& link, void* context, uint32_t tag, uint64_t bytes) {
  auto* transfer = static_cast<Transfer*>(context);
  TransferWork& work = *transfer->work_;
  note_retired(*static_cast<Peer*>(link.user), 1);
  record_works(FlightState::kWithdrawn, *static_cast<Peer*>(link.user), kAnyRail, *transfer, 1, bytes);
  ++work.retired;
  work.cut_short = true;
  if (work.kind == OpKind::kWrite && work.pieces > 1) {
    note_kept(work);
    work.kept_bytes[tag] -= std::min(bytes, work.kept_bytes[tag]);
  }
  finish_if_done(transfer);
}

// Before anything is taken back, what is kept is what is posted: the cursor tells.
void EngineCore::note_kept(TransferWork& work) {
  if (!work.kept_bytes.empty()) return;
  work.kept_bytes.resize(work.pieces);
  for (uint32_t piece = 0; piece < work.pieces; ++piece) {
    const uint64_t length = piece_of(work.length_bytes, work.pieces, piece, kCutAlign).length_bytes;
    const uint64_t posted = work.slice_offset + (piece < work.piece ? work.peer().route_.traits->slice_bytes_max : 0);
    work.kept_bytes[piece] = std::min(length, posted);
  }
}

// Whether the receiver has a share, but not all, of the count of a cut transfer: some pieces were posted to their ends
// and not taken back. Operations without pieces count in single work requests and cannot end so.
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
  TransferWork& work = *transfer->work_;
  Peer& peer = work.peer();
  if (closed()) {
    fail(transfer, Status::kEngineClosed, peer.address().name, "the engine was closed");
  } else if (peer.state() == PeerState::kLost) {
    fail(transfer, Status::kPeerLost, peer.address().name, peer.work_->note);
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
  // Not at once: the transport may be in the middle of telling us.
  peer.work_->backlog.push_back({transfer, 0});
  mark_busy(peer);
  runnable_ = true;
}

void EngineCore::close_item(Transfer* transfer) { --transfer->work_->open_items; }

// Notes the first failure. The transfer completes once nothing of it is under way any more.
void EngineCore::fail(Transfer* transfer, Status status, const std::string& peer, const std::string& detail) {
  TransferWork& work = *transfer->work_;
  if (work.failure != Status::kDone) return;
  work.failure = status;
  work.failed_peer = peer;
  work.detail = detail;
}

void EngineCore::finish_if_done(Transfer* transfer) {
  TransferWork& work = *transfer->work_;
  if (work.open_items > 0 || work.retired < work.posted || transfer->done()) return;
  if (work.has_plan && work.verify->open > 0) return;
  // Targets of a scatter are each for itself: those of a peer that is well are counted, whatever became of others.
  const bool may_be_right = work.failure == Status::kDone || work.kind == OpKind::kScatter;
  if (may_be_right && !work.cut_short && work.has_plan && !work.verify->is_asked && !work.verify->checks.empty()) {
    verifications_.ask(transfer);
  } else if (work.failure != Status::kDone) {
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
    work.bytes_retired = work.length_bytes;
  } else {
    bump(status == Status::kCancelled ? counters_.cancelled : counters_.failed);
  }
  const bool unseen = std::exchange(work.at_once, false);
  // Of what was done at once its works tell already, unless they are too many to be recorded, or there are none.
  if (!unseen || status != Status::kDone || work.targets_total > 0 || work.posted == 0) {
    record_transfer(status == Status::kDone        ? FlightState::kDone
                    : status == Status::kCancelled ? FlightState::kCancelled
                                                   : FlightState::kFailed,
                    *transfer);
  }
  Region* const local = std::exchange(work.local, nullptr);
  if (local != nullptr && !unseen) local->end_op();
  if (!work.targets.empty()) work.targets.clear();
  bump(finished_);
  if (unseen) {
    transfer->complete_unseen(status);
  } else {
    transfer->complete(status);
  }
}

void EngineCore::fail_backlogs(Peer& peer, Status status, const std::string& detail) {
  peer.track_->queued.store(0, std::memory_order_relaxed);
  for (auto* backlog : {&peer.work_->backlog, &peer.work_->messages, &peer.work_->services}) {
    std::deque<PostItem> items;
    items.swap(*backlog);
    for (const PostItem& item : items) {
      fail(item.transfer, status, peer.address().name, detail);
      close_item(item.transfer);
      finish_if_done(item.transfer);
    }
  }
}

// Takes cancelled transfers out of the queues, ours and, as far as the peer has not begun, the transport's. What the
// peer has begun runs to its end: only then is the cancellation reported, which is what makes it safe to act on.
void EngineCore::scan_cancels() {
  // acq_rel: pairs with the release in request_cancel_scan. Either we see the requests of everybody whose flag we take
  // away, or their flag stays; a plain store could pass the loads below.
  cancel_scan_.exchange(false, std::memory_order_acq_rel);
  const auto is_cut = [](const Transfer* transfer) {
    return is_to_be_cancelled(*transfer, *transfer->work_) && !transfer->work_->resumed;
  };
  for (const PeerRef& peer : busy_) {
    for (auto* backlog : {&peer->work_->backlog, &peer->work_->messages}) {
      std::deque<PostItem> kept;
      std::deque<PostItem> cut;
      for (const PostItem& item : *backlog) {
        (is_cut(item.transfer) ? cut : kept).push_back(item);
      }
      backlog->swap(kept);
      for (const PostItem& item : cut) {
        item.transfer->work_->cut_short = true;
        close_item(item.transfer);
        if (is_mutated(Mutation::kCancelEarly)) item.transfer->work_->posted = item.transfer->work_->retired;
        finish_if_done(item.transfer);
      }
    }
  }
  // Only what posts no more. A request that came after we looked at the queues waits for the next scan: else an
  // immediate might still be posted whose bytes were taken back.
  transports_.withdraw([](void* context) {
    const auto* transfer = static_cast<Transfer*>(context);
    const TransferWork& work = *transfer->work_;
    return (work.open_items == 0 || work.cut_short) && !work.resumed && is_to_be_cancelled(*transfer, work);
  });
}

}  // namespace crossrail
