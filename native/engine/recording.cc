// What an engine reports about itself: counts, and the flight recorder's entries.
#include "engine/core.h"

namespace crossrail {

EngineStats EngineCore::stats() const {
  const auto get = [](const std::atomic<uint64_t>& counter) { return counter.load(std::memory_order_relaxed); };
  EngineStats stats{};
  stats.transfers_done = counters_.done.load(std::memory_order_acquire);
  stats.transfers_failed = counters_.failed.load(std::memory_order_acquire);
  stats.transfers_cancelled = counters_.cancelled.load(std::memory_order_acquire);
  // Last, as in users_inflight().
  stats.transfers_submitted = users_accepted();
  stats.transfers_inflight =
      stats.transfers_submitted - stats.transfers_done - stats.transfers_failed - stats.transfers_cancelled;
  stats.bytes_written = get(counters_.bytes_written);
  stats.bytes_read = get(counters_.bytes_read);
  stats.messages_sent = get(counters_.sent);
  stats.messages_received = get(counters_.received);
  stats.imm_units_received = get(counters_.imm_units);
  stats.imm_overflow_units = get(counters_.imm_overflow);
  stats.work_requests_posted = get(counters_.posted);
  stats.work_requests_retried = get(counters_.retried);
  stats.worker_rounds = get(counters_.rounds);
  stats.worker_sleeps = get(counters_.sleeps);
  stats.peers_connected = get(counters_.connected);
  stats.peers_lost = get(counters_.lost);
  stats.regions_open = get(counters_.regions);
  return stats;
}

// --- progress holder ---

void EngineCore::record_transfer(FlightState state, const Transfer& transfer) {
  assert_holder();
  const TransferWork& work = *transfer.work_;
  const bool has_targets = work.kind == OpKind::kScatter || work.kind == OpKind::kBarrier;
  recorder_.record({.bytes = work.length_bytes,
                    .transfer = work.serial,
                    .peer = has_targets ? 0 : work.peer().track_->id,
                    .imm = work.imm,
                    .count = has_targets ? static_cast<uint32_t>(work.targets_total) : 1,
                    .op = static_cast<uint32_t>(work.kind) + 1,
                    .state = state});
}

// Works of one transfer that were handed to a transport, were put on one of its rails, or ended there.
FlightEntry EngineCore::entry_of_works(FlightState state, const Peer& peer, const TransferWork& work, uint32_t count,
                                       uint64_t bytes) {
  return {.bytes = bytes,
          .transfer = work.serial,
          .peer = peer.track_->id,
          .imm = work.imm,
          .count = count,
          .op = static_cast<uint32_t>(work.kind) + 1,
          .state = state};
}

void EngineCore::record_works(FlightState state, const Peer& peer, uint32_t rail, const Transfer& transfer,
                              uint32_t count, uint64_t bytes) {
  assert_holder();
  recorder_.record(peer.route_.index, rail, entry_of_works(state, peer, *transfer.work_, count, bytes));
}

void EngineCore::record_posted(Peer& peer, uint32_t rail, uint32_t accepted, uint32_t completed, uint64_t bytes,
                               const Transfer& transfer) {
  assert_holder();
  // Works retired through the sink meanwhile are already subtracted: below zero for a moment.
  if (accepted > completed) bump(peer.track_->outstanding, accepted - completed);
  record_works(accepted > completed ? FlightState::kPosted : FlightState::kMoved, peer, rail, transfer, accepted,
               bytes);
}

// The first, and most likely only, work of a transfer that nobody else knows was over at once. Since every transfer is
// recorded in some way (finish), transfers that repeat each other without another entry in between have consecutive
// numbers.
void EngineCore::record_first_moved(const Peer& peer, uint32_t rail, uint64_t bytes, const TransferWork& work) {
  assert_holder();
  recorder_.record_repeatable(&peer, peer.route_.index, rail,
                              entry_of_works(FlightState::kMoved, peer, work, 1, bytes));
}

void EngineCore::note_retired(Peer& peer, uint32_t count) {
  PeerTrack& track = *peer.track_;
  track.outstanding.store(track.outstanding.load(std::memory_order_relaxed) - count, std::memory_order_relaxed);
  bump(track.moves);
}

void EngineCore::note_queued(Peer& peer) {
  const PeerWork& work = *peer.work_;
  peer.track_->queued.store(work.backlog.size() + work.shorts.size() + work.messages.size(), std::memory_order_relaxed);
}

// Consecutive arrivals of one number become one entry.
void EngineCore::record_arrivals() {
  assert_holder();
  if (arrived_count_ == 0) return;
  recorder_.record(
      {.bytes = arrived_units_, .imm = arrived_imm_, .count = arrived_count_, .state = FlightState::kArrived});
  arrived_units_ = arrived_count_ = 0;
}

}  // namespace crossrail
