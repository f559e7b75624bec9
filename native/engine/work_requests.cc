// How each operation is cut into work requests: on which rail, how long, and worth how much of a count.
#include <algorithm>
#include <memory>

#include "engine/core.h"
#include "engine/sharding.h"
#include "util/mutation.h"

namespace crossrail {

namespace {

constexpr uint32_t kBatch = 128;                       // work requests handed to the transport at once
constexpr uint64_t kBytesPerTurn = uint64_t{1} << 20;  // of one transfer before others get a turn
constexpr uint32_t kBatchesPerTurn = 4;                // of one paged transfer
// For long ranges over rails that the transport balances: at the end, each rail idles for half a slice on average.
constexpr uint64_t kSlicesPerRail = 32;
constexpr uint64_t kGpuSlices = 64;  // slices merged into one where a GPU copies: that occupies no core

// Work requests that are constructed one by one: constructing the whole array for a few would take longer than posting
// those.
union Batch {
  Batch() {}
  WorkRequest requests[kBatch];
};

bool is_of_gpu(const TransferWork& work) { return work.local != nullptr && work.local->gpu() >= 0; }

// The slice length for this transfer.
uint64_t slice_bytes_of(const Traits& traits, const TransferWork& work) {
  return traits.slice_bytes_max * (traits.fifo_rails && is_of_gpu(work) ? kGpuSlices : 1);
}

// Whether one slice may land while another fails: the one with the immediate is then posted only after the others are
// done. On ordered rails this happens where the CPU has a driver copy, which may refuse one copy and carry out the
// next.
bool fails_in_parts(const Traits& traits, const TransferWork& work, const RemoteRegion* dst) {
  const bool is_gpu = is_of_gpu(work) || (dst != nullptr && dst->descriptor().memory != MemoryKind::kHost);
  return !traits.fifo_rails || (traits.copies_gpu_memory && is_gpu);
}

// Largest power of two <= value, value in 1..256: its log2.
constexpr uint32_t floor_log2(uint64_t value) { return 63 - static_cast<uint32_t>(__builtin_clzll(value)); }

}  // namespace

// How a contiguous range is cut on its way to this peer. Decided once, when the link is up: a transfer must end the way
// in which it was begun.
void EngineCore::plan_range(const Peer& peer, TransferWork& work) {
  const Traits& traits = *peer.route_.traits;
  work.pieces = 1;
  work.is_evened = false;
  work.slice_bytes = slice_bytes_of(traits, work);
  if (work.rail != kAnyRail || work.length_bytes < 2 * traits.piece_bytes_min) return;
  if (!traits.balances_rails) {
    work.pieces = pieces_for(work.length_bytes, traits.rail_count, traits.piece_bytes_min);
    return;
  }
  const uint32_t lanes = peer.link_->lanes();
  if (lanes == 1) return;
  // Very long: even a sixteenth of it is too coarse to keep all rails busy until the end. It is cut finer than a count
  // can be, one piece in many slices, and the immediate follows once all of them are in place.
  work.is_evened = work.length_bytes >= 2 * kRailsMax * traits.piece_bytes_min;
  if (work.is_evened) {
    const uint64_t even = work.length_bytes / (kSlicesPerRail * lanes) / kCutAlign * kCutAlign;
    work.slice_bytes = std::clamp(even, traits.piece_bytes_min, traits.slice_bytes_max);
    return;
  }
  // The transport gives each piece to a rail that is free: having more pieces than rails evens out rails of different
  // speed.
  work.pieces = pieces_for(work.length_bytes, kRailsMax, traits.piece_bytes_min);
}

// The rail for a piece. Rails are counted over all transports; this one may have fewer.
uint32_t EngineCore::rail_for(const Peer& peer, const TransferWork& work, uint32_t piece) {
  const Traits& traits = *peer.route_.traits;
  if (traits.balances_rails && work.rail == kAnyRail) return kAnyRail;
  const uint32_t rail = work.first_rail + piece;
  if (rail < traits.rail_count) return rail;
  const uint32_t wrapped = rail - traits.rail_count;  // nearly always enough, and avoids a division
  return wrapped < traits.rail_count ? wrapped : wrapped % traits.rail_count;
}

// bytes: of all requests.
uint32_t EngineCore::post(Peer& peer, uint32_t rail, std::span<const WorkRequest> requests, uint64_t bytes,
                          Transfer* transfer) {
  assert_holder();
  TransferWork& work = *transfer->work_;
  uint32_t completed = 0;
  // Counted first: the transport may retire some through the sink while it posts.
  work.posted += static_cast<uint32_t>(requests.size());
  // Null for a transport that balances its rails: that one reports what it sent on which (on_sent).
  RailTraffic* const traffic = peer.posted_ != nullptr ? &peer.posted_[rail] : nullptr;
  const bool is_timed = traffic != nullptr && traffic->times_next(requests.size(), bytes);
  const int64_t since_ns = is_timed ? clock().now_ns() : 0;
  const uint32_t accepted = peer.route_.transport->post(*peer.link_, rail, requests, &completed);
  work.posted -= static_cast<uint32_t>(requests.size()) - accepted;
  work.retired += completed;
  if (completed > 0 && work.kind == OpKind::kScatter)
    work.slices_retired(requests.front().tag, completed, Status::kDone);
  bump(counters_.posted, accepted);
  if (accepted < requests.size()) {
    bump(counters_.retried);
    bump(peer.track_->refused);
    for (const WorkRequest& request : requests.subspan(accepted)) bytes -= request.length_bytes;
  }
  if (accepted == 0) return 0;
  // If there are several, all are pages, and alike.
  if (traffic != nullptr) traffic->count(accepted, bytes, requests.front().has_imm ? accepted : 0);
  if (accepted > completed) {
    start_timing(peer, rail, accepted, transfer);
  } else if (is_timed) {
    traffic->note_latency(clock().now_ns() - since_ns);
  }
  // If all targets of a scatter are done at once, finish() makes one entry: an entry for each would cost too much.
  const bool has_targets = work.kind == OpKind::kScatter || work.kind == OpKind::kBarrier;
  if (accepted == completed && has_targets) return accepted;
  if (accepted == 1 && completed == 1 && work.at_once && work.posted == 1) {
    const uint32_t op = static_cast<uint32_t>(work.kind) + 1;
    if (!recorder_.repeat(&peer, rail, work.imm, op, bytes)) record_first_moved(peer, rail, bytes, work);
  } else {
    record_posted(peer, rail, accepted, completed, bytes, *transfer);
  }
  return accepted;
}

// Copies by a GPU are only started here, and the transport waits for them: the more at once the better. Queuing a long
// request takes no longer than queuing a short one, so a round is limited by requests, not by bytes.
void EngineCore::count_in_round(const Peer& peer, const TransferWork& work, uint64_t bytes, uint32_t requests) {
  constexpr uint64_t kGpuBytesForOne = 64;
  constexpr uint64_t kQueuedBytes = 16 << 10;  // counted per request, at most
  if (is_of_gpu(work)) bytes /= kGpuBytesForOne;
  if (!peer.route_.traits->moves_while_posting) bytes = std::min(bytes, requests * kQueuedBytes);
  round_bytes_ += bytes;
}

// After post() took too little. If the transport chooses rails, its queue for such works to this peer is full, and most
// likely so for those behind it. Otherwise this concerns one rail, or a region whose owner has not answered yet.
EngineCore::Progress EngineCore::refused(uint32_t rail) {
  return rail == kAnyRail ? Progress::kFull : Progress::kBlocked;
}

RemoteKey* EngineCore::key_of(Peer& peer, RemoteRegion& region) {
  assert_holder();
  if (!region.key_) region.key_ = peer.route_.transport->resolve(*peer.link_, region.descriptor());
  return region.key_.get();
}

// The part of a transfer's range at `offset`, without immediate and context yet.
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
  assert_holder();
  TransferWork& work = *transfer->work_;
  WorkRequest request = range_request(peer, work, key, 0, work.length_bytes);
  request.has_imm = work.imm != kNoImm;
  request.wire_imm = request.has_imm ? wire_imm(work.imm, 0) : 0;
  request.context = transfer;
  const uint32_t rail = rail_for(peer, work, 0);
  if (post(peer, rail, {&request, 1}, work.length_bytes, transfer) == 0) return refused(rail);
  count_in_round(peer, work, work.length_bytes);
  return Progress::kAllPosted;
}

// A contiguous range: cut into one piece per rail, each piece into slices. The last slice of a piece carries the
// piece's share of the immediate. On unordered rails it waits until everything before it is done; for an evened range
// it travels alone, so that its own latency is all there is to wait for. Resumed: starts over, without what was kept.
EngineCore::Progress EngineCore::post_range(Peer& peer, Transfer* transfer) {
  assert_holder();
  TransferWork& work = *transfer->work_;
  const Traits& traits = *peer.route_.traits;
  RemoteKey* key = key_of(peer, *work.remote);
  if (work.pieces == 0) plan_range(peer, work);
  const uint64_t slice_bytes = work.slice_bytes;
  if (work.pieces == 1 && work.length_bytes <= slice_bytes) return post_short_range(peer, transfer, key);
  const bool imm_alone = work.imm != kNoImm && work.is_evened;
  const bool in_parts = fails_in_parts(traits, work, work.remote.get());
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
      if (has_imm && longest > slice_bytes && work.retired < work.posted && in_parts &&
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
      if (post(peer, rail, {&request, 1}, length, transfer) == 0) return refused(rail);
      if (work.retired != retired_before && work.failure == Status::kDone) bump(work.bytes_retired, length);
      if (work.failure != Status::kDone) return Progress::kAllPosted;
      turn_bytes += length;
      count_in_round(peer, work, length);
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
    if (post(peer, kAnyRail, {&request, 1}, 0, transfer) == 0) return Progress::kFull;
  }
  return Progress::kAllPosted;
}

// Pages: neighbours on both sides travel as one request worth a power of two of counts; batches go round the rails.
EngineCore::Progress EngineCore::post_pages(Peer& peer, Transfer* transfer) {
  assert_holder();
  TransferWork& work = *transfer->work_;
  RemoteKey* key = key_of(peer, *work.remote);
  const Traits& traits = *peer.route_.traits;
  if (work.page_bytes > traits.slice_bytes_max && !fails_in_parts(traits, work, work.remote.get()))
    return post_long_pages(peer, transfer, key);
  const bool can_join = work.local_stride_bytes == work.page_bytes && work.remote_stride_bytes == work.page_bytes;
  const uint64_t fits = std::max<uint64_t>(1, traits.slice_bytes_max / std::max<uint64_t>(1, work.page_bytes));
  const uint64_t run_max = can_join ? std::min<uint64_t>(kPagesPerRequestMax, fits) : 1;
  const uint32_t* local_pages = work.local_pages.get();
  const uint32_t* remote_pages = work.remote_pages.get();
  std::byte* const local = work.local->base() + work.local_offset;
  const uint64_t turn_bytes_max = first_bytes_only_ ? kFirstBytes : kBytesPerTurn;
  uint64_t turn_bytes = 0;
  Batch batch;
  for (uint32_t turn = 0; work.page < work.page_count; ++turn) {
    if (turn == kBatchesPerTurn || turn_bytes >= turn_bytes_max) return Progress::kMore;
    const uint64_t turn_bytes_before = turn_bytes;
    uint32_t filled = 0;
    uint64_t page = work.page;
    for (; filled < kBatch && page < work.page_count && turn_bytes < turn_bytes_max; ++filled) {
      uint64_t run = 1;
      const uint64_t limit = std::min(first_bytes_only_ ? 1 : run_max, work.page_count - page);
      while (run < limit && local_pages[page + run] == local_pages[page] + run &&
             remote_pages[page + run] == remote_pages[page] + run)
        ++run;
      uint32_t code = 0;
      if (work.imm != kNoImm && run > 1) {
        const uint32_t log2 = floor_log2(run);
        run = uint64_t{1} << log2;
        code = share_code_of_pages(log2);
      }
      WorkRequest& request = *std::construct_at(&batch.requests[filled]);
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
    const uint32_t rail = rail_for(peer, work, 0);
    const uint32_t accepted = post(peer, rail, {batch.requests, filled}, turn_bytes - turn_bytes_before, transfer);
    const bool at_once = work.retired == retired_before + accepted && work.failure == Status::kDone;
    uint64_t accepted_bytes = 0;
    for (uint32_t i = 0; i < accepted; ++i) {
      work.page += batch.requests[i].reserved;
      accepted_bytes += batch.requests[i].length_bytes;
    }
    count_in_round(peer, work, accepted_bytes, accepted);
    if (at_once) bump(work.bytes_retired, accepted_bytes);
    if (work.failure != Status::kDone) return Progress::kAllPosted;
    if (work.rail == kAnyRail && ++work.first_rail >= peer.route_.traits->rail_count) work.first_rail = 0;
    if (accepted < filled) return refused(rail);
  }
  return Progress::kAllPosted;
}

// Long pages, which nothing else should have to wait for: each goes in slices on one rail, whose order keeps the
// immediate behind them.
EngineCore::Progress EngineCore::post_long_pages(Peer& peer, Transfer* transfer, RemoteKey* key) {
  assert_holder();
  TransferWork& work = *transfer->work_;
  const Traits& traits = *peer.route_.traits;
  for (uint64_t turn_bytes = 0; work.page < work.page_count;) {
    if (turn_bytes >= kBytesPerTurn) return Progress::kMore;
    const uint64_t length = std::min(work.page_bytes - work.slice_offset, traits.slice_bytes_max);
    const bool is_last = work.slice_offset + length == work.page_bytes;
    WorkRequest request;
    request.op = WorkOp::kWrite;
    request.has_imm = is_last && work.imm != kNoImm;
    request.bulk = work.bulk;
    request.wire_imm = request.has_imm ? wire_imm(work.imm, 0) : 0;
    request.local = work.local->base() + work.local_offset + work.local_pages[work.page] * work.local_stride_bytes +
                    work.slice_offset;
    request.length_bytes = length;
    request.remote = key;
    request.remote_offset =
        work.remote_offset + work.remote_pages[work.page] * work.remote_stride_bytes + work.slice_offset;
    request.local_region = work.local->local_.on(peer.route_.index);
    request.context = transfer;
    const uint32_t retired_before = work.retired;
    const uint32_t rail = rail_for(peer, work, 0);
    if (post(peer, rail, {&request, 1}, length, transfer) == 0) return refused(rail);
    if (work.failure != Status::kDone) return Progress::kAllPosted;
    if (work.retired != retired_before) bump(work.bytes_retired, length);
    work.slice_offset += length;
    turn_bytes += length;
    count_in_round(peer, work, length);
    if (!is_last) continue;
    work.slice_offset = 0;
    ++work.page;
    if (work.rail == kAnyRail && ++work.first_rail >= traits.rail_count) work.first_rail = 0;
  }
  return Progress::kAllPosted;
}

// One target of a scatter or barrier: on one rail, in slices, the last one with the immediate.
EngineCore::Progress EngineCore::post_target(Peer& peer, Transfer* transfer, ScatterTarget& target) {
  assert_holder();
  TransferWork& work = *transfer->work_;
  const Traits& traits = *peer.route_.traits;
  const auto index = static_cast<uint32_t>(&target - work.targets.data());
  const uint32_t rail = rail_for(peer, work, index);
  RemoteKey* key = target.dst ? key_of(peer, *target.dst) : nullptr;
  const uint64_t slice_bytes = slice_bytes_of(traits, work);
  const bool counts_slices =
      work.has_plan || (target.length_bytes > slice_bytes && fails_in_parts(traits, work, target.dst.get()));
  uint64_t turn_bytes = 0;
  do {
    if (target.is_broken) return Progress::kAllPosted;  // an immediate would count bytes that are not there
    if (turn_bytes >= kBytesPerTurn) return Progress::kMore;
    const uint64_t length = std::min(target.length_bytes - target.posted_bytes, slice_bytes);
    const bool has_imm = target.imm != kNoImm && target.posted_bytes + length == target.length_bytes;
    // Its own slices only: those of other targets would hold it up, and then hold up all targets one after the other.
    if (has_imm && target.slices_open > 0) return Progress::kBlocked;
    WorkRequest request;
    request.op = WorkOp::kWrite;
    request.has_imm = has_imm;
    request.bulk = work.bulk;
    request.wire_imm = has_imm ? wire_imm(target.imm, 0) : 0;
    request.local = work.local ? work.local->base() + target.src_offset + target.posted_bytes : nullptr;
    request.length_bytes = length;
    request.remote = key;
    request.remote_offset = target.dst_offset + target.posted_bytes;
    request.local_region = work.local ? work.local->local_.on(peer.route_.index) : nullptr;
    request.context = transfer;
    request.tag = counts_slices ? index + 1 : 0;
    const uint32_t retired_before = work.retired;
    if (counts_slices) ++target.slices_open;  // first: the slice may be retired while it is posted
    if (post(peer, rail, {&request, 1}, length, transfer) == 0) {
      if (counts_slices) --target.slices_open;
      return refused(rail);
    }
    if (work.retired != retired_before && work.failure == Status::kDone) bump(work.bytes_retired, length);
    target.posted_bytes += length;
    turn_bytes += length;
    count_in_round(peer, work, length);
  } while (target.posted_bytes < target.length_bytes);
  return Progress::kAllPosted;
}

EngineCore::Progress EngineCore::post_message(Peer& peer, Transfer* transfer) {
  assert_holder();
  TransferWork& work = *transfer->work_;
  WorkRequest request;
  request.op = work.kind == OpKind::kService ? WorkOp::kService : WorkOp::kSend;
  request.local = reinterpret_cast<std::byte*>(work.payload.data());
  request.length_bytes = work.payload.size();
  request.context = transfer;
  const uint32_t rail = peer.route_.traits->balances_rails ? kAnyRail : 0;
  if (post(peer, rail, {&request, 1}, request.length_bytes, transfer) == 0) return Progress::kFull;
  return Progress::kAllPosted;
}

}  // namespace crossrail
