#include "engine/heartbeats.h"

#include <algorithm>
#include <string>

#include "engine/core.h"
#include "engine/service_wire.h"

namespace crossrail {

namespace {

std::string exact_seconds_text(int64_t ns) {
  const int64_t ms = ns / 1'000'000;
  return std::to_string(ms / 1000) + "." + std::to_string(1000 + ms % 1000).substr(1) + " s";
}

}  // namespace

void Heartbeats::tend(int64_t now) {
  if (now < due_ns_) return;
  // We ourselves were stopped: nobody had a chance to answer.
  const bool has_slept = tended_ns_ != 0 && now - due_ns_ > interval_ns_ / 2;
  tended_ns_ = now;
  due_ns_ = now + interval_ns_;
  for (const PeerRef& peer : core_->peer_table().peers()) {
    if (!is_linked(peer->state())) continue;
    Heartbeat& beat = core_->heartbeat_of(*peer);
    if (has_slept && beat.sent_ns != 0) beat.sent_ns = now;
    tend_peer(*peer, now);
  }
}

void Heartbeats::tend_peer(Peer& peer, int64_t now) {
  Heartbeat& beat = core_->heartbeat_of(peer);
  if (beat.sent_ns == 0 && now >= beat.next_ns) {
    beat.sent_ns = now;
    core_->send_service(peer, encode(Ping{}), 0);  // may complete at once
  }
  if (beat.sent_ns == 0) {
    due_ns_ = std::min(due_ns_, beat.next_ns);
    return;
  }
  const int64_t silent_ns = now - beat.sent_ns;
  const std::string detail = "no answer to a heartbeat for " + exact_seconds_text(silent_ns);
  if (silent_ns >= kFrozenAfter * interval_ns_) {
    core_->set_liveness(peer, PeerState::kFrozen,
                        detail + ": its process is stopped or gets no CPU time, or its network fails");
  } else if (silent_ns >= interval_ns_ && peer.state() == PeerState::kConnected) {
    core_->set_liveness(peer, PeerState::kSlow, detail);
  }
  const int64_t patience_ns = silent_ns < interval_ns_ ? interval_ns_ : kFrozenAfter * interval_ns_;
  if (silent_ns < patience_ns) due_ns_ = std::min(due_ns_, beat.sent_ns + patience_ns);
}

void Heartbeats::on_ended(Peer& peer, Status status) {
  Heartbeat& beat = core_->heartbeat_of(peer);
  const int64_t sent_ns = std::exchange(beat.sent_ns, 0);
  beat.next_ns = sent_ns + interval_ns_;
  due_ns_ = std::min(due_ns_, beat.next_ns);
  if (status != Status::kDone) return;
  const int64_t rtt_ns = std::max<int64_t>(1, core_->clock().now_ns() - sent_ns);
  beat.rtt_ns = rtt_ns;
  beat.rtt_min_ns = beat.answered == 0 ? rtt_ns : std::min(beat.rtt_min_ns, rtt_ns);
  beat.rtt_max_ns = std::max(beat.rtt_max_ns, rtt_ns);
  beat.rtt_smooth_ns = beat.answered == 0 ? rtt_ns : beat.rtt_smooth_ns + (rtt_ns - beat.rtt_smooth_ns) / 8;
  ++beat.answered;
  core_->set_liveness(peer, PeerState::kConnected, "it answered a heartbeat after " + exact_seconds_text(rtt_ns));
}

}  // namespace crossrail
