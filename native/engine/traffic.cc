// What went where, and how long it took: counted as works are posted, sent and retired, and put together when asked
// for.
#include "engine/traffic.h"

#include <algorithm>

#include "engine/core.h"
#include "util/clock.h"

namespace crossrail {

// --- progress holder ---

void EngineCore::start_timing(Peer& peer, uint32_t rail, uint32_t accepted, const Transfer* transfer) {
  assert_holder();
  TimedWork& timed = peer.work_->timed;
  const TransferWork& work = *transfer->work_;
  if (timed.transfer != nullptr) timed.in_burst = true;
  if (peer.track_->rail_count == 0 || timed.transfer != nullptr || accepted != 1 || work.posted - work.retired != 1)
    return;
  if (timed.in_burst && timed.passed < timed.to_pass) {
    ++timed.passed;
    return;
  }
  const auto next = static_cast<uint8_t>((timed.to_pass + 1) % 4);
  timed = {transfer, clock().now_ns(), rail == kAnyRail ? 0 : rail, 0, next, false};
}

// rail: where it was over, or kAnyRail: where it was posted.
void EngineCore::end_timing(Peer& peer, uint32_t rail, const Transfer* transfer, bool is_good) {
  assert_holder();
  TimedWork& timed = peer.work_->timed;
  if (timed.transfer != transfer) return;
  timed.transfer = nullptr;
  if (is_good) peer.track_->rails[rail == kAnyRail ? timed.rail : rail].note_latency(clock().now_ns() - timed.since_ns);
}

void EngineCore::on_sent(Link& link, uint32_t rail, void* context, uint32_t count, uint64_t bytes, uint32_t imms) {
  assert_holder();
  const Peer& peer = *static_cast<Peer*>(link.user);
  if (peer.track_->rail_count > 0) peer.track_->rails[rail].count(count, bytes, imms);
  record_works(FlightState::kSent, peer, rail, *static_cast<Transfer*>(context), count, bytes);
}

void EngineCore::on_over(Link& link, uint32_t rail, void* context, uint32_t count, uint64_t bytes) {
  assert_holder();
  Peer& peer = *static_cast<Peer*>(link.user);
  end_timing(peer, rail, static_cast<Transfer*>(context), true);
  record_works(FlightState::kRetired, peer, rail, *static_cast<Transfer*>(context), count, bytes);
}

void EngineCore::on_rail_broken(Link& link, uint32_t rail) {
  assert_holder();
  const PeerTrack& track = *static_cast<Peer*>(link.user)->track_;
  if (track.rail_count > 0) bump(track.rails[rail].broken);
}

void EngineCore::on_sent_again(Link& link, uint32_t rail, uint32_t count) {
  assert_holder();
  const PeerTrack& track = *static_cast<Peer*>(link.user)->track_;
  if (track.rail_count > 0) bump(track.rails[rail].again, count);
}

// --- any thread ---

TrafficReport EngineCore::traffic(int64_t patience_ns) {
  constexpr int64_t kAllPeersNs = 3'000'000'000;  // while we are let in, but late each time
  TrafficReport report;
  const Deadline last = now_ns() + std::max(patience_ns, kAllPeersNs);
  const auto [peers, gone_counts] = peers_.peers_and_gone_counts();
  std::array<uint32_t, kTransportsMax> first{};
  for (uint32_t transport = 0; transport < transports_.size(); ++transport) {
    first[transport] = static_cast<uint32_t>(report.rails.size());
    const uint32_t rail_count = options_.counts_traffic ? transports_.at(transport).traits().rail_count : 0;
    for (uint32_t rail = 0; rail < rail_count; ++rail)
      report.rails.push_back({transport_name(transports_.kind_at(transport)), rail, gone_counts[transport][rail], 0});
  }
  std::vector<PeerRef> known;
  for (const PeerRef& peer : peers) {
    const PeerTrack& track = *peer->track_;
    for (uint32_t rail = 0; rail < track.rail_count; ++rail)
      report.rails[first[peer->route_.index] + rail].counts.add(track.rails[rail]);
    if (peer->state() != PeerState::kLost) known.push_back(peer);
  }
  bool was_let_in = false;
  const auto enter = [&](const std::function<void()>& work) {
    const uint64_t rounds = counters_.rounds.load(std::memory_order_relaxed);
    report.is_whole = look_as_holder(work, std::min(now_ns() + patience_ns, last));
    was_let_in = was_let_in || report.is_whole;
    // A holder that is merely busy makes rounds, whether or not it makes room for us.
    report.hangs = !was_let_in && counters_.rounds.load(std::memory_order_relaxed) == rounds;
  };
  if (known.empty()) enter([] {});
  for (const PeerRef& peer : known) {
    const PeerTrack& track = *peer->track_;
    PeerTrafficReport& shown = report.peers.emplace_back();
    shown.peer = peer->address().name;
    shown.transport = track.transport;
    shown.state = peer->state();
    for (uint32_t rail = 0; rail < track.rail_count; ++rail) shown.counts.add(track.rails[rail]);
    // Works may be retired that are just being posted.
    const auto not_negative = [](uint64_t count) { return static_cast<int64_t>(count) < 0 ? 0 : count; };
    shown.outstanding = not_negative(track.outstanding.load(std::memory_order_relaxed));
    shown.queued = track.queued.load(std::memory_order_relaxed);
    shown.refused = track.refused.load(std::memory_order_relaxed);
    shown.failed = track.failed.load(std::memory_order_relaxed);
    if (!report.is_whole) continue;
    enter([&] {
      if (peer->link_ == nullptr || closed()) return;
      Transport& transport = *peer->route_.transport;
      for (uint32_t rail = 0; rail < track.rail_count; ++rail)
        report.rails[first[peer->route_.index] + rail].depth += transport.rail_depth(*peer->link_, rail);
      for (PathReport& path : transport.explain(*peer->link_)) {
        if (path.down_rail && *path.down_rail < track.rail_count) {
          ++report.rails[first[peer->route_.index] + *path.down_rail].down;
        }
        shown.paths.push_back(
            {std::move(path.what), std::move(path.path), std::move(path.reason), path.gb_per_s, path.bytes});
      }
    });
  }
  return report;
}

}  // namespace crossrail
