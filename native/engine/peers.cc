// Peers: creating, connecting, states, forgetting, explaining.
#include <algorithm>
#include <utility>

#include "engine/core.h"
#include "engine/path_speed.h"
#include "engine/sharding.h"
#include "util/errors.h"
#include "util/mutation.h"

namespace crossrail {

namespace {

constexpr const char* kForgotten = "forgotten on request";

// Rails as both sides would pair them; once connected, the transport knows better.
std::vector<RailReport> expected_rails(const Route& route, const Address& own, const Address& peer) {
  std::vector<RailReport> rails;
  const uint32_t count = own.rail_count_on(route.kind);
  for (uint32_t rail = 0; rail < count; ++rail)
    rails.push_back({rail, peer_rail(rail, count, peer.rail_count_on(route.kind))});
  return rails;
}

void add_rails(PeerExplanation& explanation, std::span<const RailReport> rails, TransportKind kind, const Address& own,
               std::span<const std::string> own_devices, const Address& peer) {
  for (const RailReport& rail : rails) {
    RailExplanation& shown = explanation.rails.emplace_back();
    shown.rail = rail.rail;
    shown.peer_rail = rail.peer_rail;
    if (kind == TransportKind::kTcp && rail.rail < own.endpoints.size() && rail.peer_rail < peer.endpoints.size()) {
      shown.endpoint = to_text(own.endpoints[rail.rail]);
      shown.peer_endpoint = to_text(peer.endpoints[rail.peer_rail]);
    }
  }
  explanation.gb_per_s_expected = expected_gb_per_s(rails, kind, own, own_devices, peer);
}

}  // namespace

PeerRef EngineCore::add_peer(const Address& address) {
  if (PeerRef known = peers_.find(address)) return known;
  if (peers_.is_crowded()) {  // peers that recycled transfers refer to would not be removed
    transfers_.drop_regions([](const Peer& peer) { return peer.state() == PeerState::kLost; });
  }
  Route route = transports_.choose(address);
  return peers_.find_or_add(address, [&] {  // another thread may have added it meanwhile
    auto track = recorder_.add_peer(address.name, address.pid, transport_name(route.kind), PeerState::kUnknown,
                                    options_.counts_traffic ? route.traits->rail_count : 0);
    return PeerRef::adopt(new Peer(std::make_shared<const Address>(address), std::move(route), std::move(track)));
  });
}

void EngineCore::start_connect(Peer& peer) {
  assert_holder();
  if (peer.link_ != nullptr || closed()) return;
  if (peer.state() == PeerState::kLost && !peer.work_->is_worth_another_try) return;
  if (!peers_.has(peer)) {  // begun before the peer was forgotten: there must be no second link to an engine
    peer.work_->note = kForgotten;
    peer.work_->is_worth_another_try = false;
    set_state(peer, PeerState::kLost, FlightState::kForgotten);
    return;
  }
  set_state(peer, PeerState::kConnecting, FlightState::kConnecting);
  try {
    peer.link_ = peer.route_.transport->connect(peer.address_);
    peer.link_->user = &peer;
  } catch (const TransportError& error) {  // no memory or descriptors for a link: the peer is out of reach
    peer.work_->note = error.what();
    peer.work_->is_worth_another_try = true;
    set_state(peer, PeerState::kLost, FlightState::kLost);
    tell_lost(peer, EngineEvent::Kind::kPeerLost, error.what());
  }
}

// Reported once: an asker that we answer is tried again and again (UntoldAnswers), though it may be gone.
bool EngineCore::tell_lost(Peer& peer, EngineEvent::Kind kind, const std::string& reason) {
  assert_holder();
  if (std::exchange(peer.work_->is_told_lost, true)) return false;
  add_event({kind, peer.address().name, reason});
  return true;
}

void EngineCore::forget_peer(Peer& peer) {
  run_as_holder([&] {
    // Earlier submits end with the rest; others may go on submitting for ever.
    for (const uint64_t earlier = submits_.pushed(); taken_.load(std::memory_order_relaxed) < earlier;) {
      if (take_submits() == 0) break;
    }
    if (peer.link_ != nullptr) {
      peer.route_.transport->disconnect(*peer.link_);
      peer.link_ = nullptr;
    }
    fail_backlogs(peer, Status::kPeerLost, kForgotten);
    verifications_.fail(&peer, Status::kPeerLost, kForgotten);
    // Nobody will connect this peer again, and those waiting for its connection are told.
    peer.work_->note = kForgotten;
    set_state(peer, PeerState::kLost, FlightState::kForgotten);
    peers_.remove(peer);
  });
  transfers_.drop_regions([&](const Peer& other) { return &other == &peer; });
}

void EngineCore::set_state(Peer& peer, PeerState state, FlightState shown) {
  assert_holder();
  peer.state_.store(state, std::memory_order_release);
  peer.track_->state.store(state, std::memory_order_relaxed);
  recorder_.record({.peer = peer.track_->id, .count = 1, .state = shown});
}

void EngineCore::set_liveness(Peer& peer, PeerState state, const std::string& detail) {
  assert_holder();
  const PeerState before = peer.state();
  if (before == state || !is_linked(before)) return;
  const bool moves = state == PeerState::kConnected;
  if (moves && is_mutated(Mutation::kNeverThaw)) return;
  set_state(peer, state,
            moves                       ? FlightState::kThawed
            : state == PeerState::kSlow ? FlightState::kSlow
                                        : FlightState::kFrozen);
  peer.work_->note = moves ? "" : detail;
  add_event({moves                       ? EngineEvent::Kind::kPeerThawed
             : state == PeerState::kSlow ? EngineEvent::Kind::kPeerSlow
                                         : EngineEvent::Kind::kPeerFrozen,
             peer.address().name, detail});
}

Status EngineCore::map(Peer& peer, RemoteRegion& region, int gpu, Mapping* mapping) {
  assert_holder();
  if (closed()) return Status::kEngineClosed;
  if (peer.link_ == nullptr) return Status::kPeerLost;
  const Status status = peer.route_.transport->map(*peer.link_, *key_of(peer, region), gpu, mapping);
  // The owner knows the region's length better than a descriptor does.
  const bool is_longer = status == Status::kDone && region.length_bytes() > mapping->length_bytes;
  return is_longer ? Status::kOutOfBounds : status;
}

PeerExplanation EngineCore::explain(Peer& peer) {
  const Route& route = peer.route_;
  PeerExplanation explanation{.peer = peer.address().name,
                              .transport = transport_name(route.kind),
                              .reason = route.reason,
                              .state = peer.state(),
                              .note = {},
                              .rails = {},
                              .gb_per_s_expected = 0,
                              .paths = {},
                              .heartbeat = {}};
  std::vector<RailReport> rails;
  look_as_holder([&] {
    explanation.state = peer.state();
    explanation.note = peer.work_->note;
    explanation.heartbeat = peer.work_->heartbeat;
    if (peer.link_ == nullptr || closed()) return;
    rails = route.transport->explain_rails(*peer.link_);
    for (PathReport& path : route.transport->explain(*peer.link_)) {
      explanation.paths.push_back(
          {std::move(path.what), std::move(path.path), std::move(path.reason), path.gb_per_s, path.bytes});
    }
  });
  if (rails.empty()) rails = expected_rails(route, route.transport->address(), peer.address());
  add_rails(explanation, rails, route.kind, route.transport->address(), transports_.rail_devices(route.index),
            peer.address());
  return explanation;
}

}  // namespace crossrail
