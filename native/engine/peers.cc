// Peers: creating, connecting, states, forgetting, explaining.
#include <algorithm>
#include <mutex>
#include <tuple>
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

bool is_linked(PeerState state) {
  return state == PeerState::kConnected || state == PeerState::kSlow || state == PeerState::kFrozen;
}

// One incarnation is one engine. Only the place where it is reached may legitimately differ between addresses, through
// forwarded ports, say: the first one is used. Any other difference means that an address was altered or made up.
void check_same(const Peer& peer, const Address& address) {
  const Address& known = peer.address();
  const auto identity = [](const Address& of) { return std::tie(of.name, of.host, of.net, of.pid, of.transports); };
  if (identity(known) == identity(address)) return;
  throw UsageError(
      "peer '" + address.name + "' (pid " + std::to_string(address.pid) + ") has the same incarnation as '" +
      known.name + "' (pid " + std::to_string(known.pid) +
      "), which is already known here, and differs from it: an address or descriptor was altered on its way. Next: "
      "forget_peer() it, and get a new address and descriptors from the peer");
}

}  // namespace

PeerRef EngineCore::add_peer(const Address& address) {
  bool is_crowded = false;
  {
    std::lock_guard lock(tables_mutex_);
    const auto known = peers_.find(address.incarnation);
    if (known != peers_.end()) {
      check_same(*known->second, address);
      return known->second;
    }
    is_crowded = peers_.size() >= peers_sweep_at_;
  }
  if (is_crowded) {  // take_lost_peers() would otherwise find them named
    transfers_.drop_regions([](const Peer& peer) { return peer.state() == PeerState::kLost; });
  }
  Route route = transports_.choose(address);
  std::vector<PeerRef> lost;  // let go after the mutex
  std::lock_guard lock(tables_mutex_);
  if (is_mutated(Mutation::kAcceptStaleIncarnation)) {
    for (auto& [incarnation, known] : peers_) {
      if (known->address().name == address.name) return known;
    }
  }
  const auto known = peers_.find(address.incarnation);  // added by another thread meanwhile
  if (known != peers_.end()) {
    check_same(*known->second, address);
    return known->second;
  }
  lost = take_lost_peers();
  auto track = recorder_.add_peer(address.name, address.pid, transport_name(route.kind), PeerState::kUnknown,
                                  options_.counts_traffic ? route.traits->rail_count : 0);
  auto peer = PeerRef::adopt(new Peer(std::make_shared<const Address>(address), std::move(route), std::move(track)));
  peers_.emplace(address.incarnation, peer);
  return peer;
}

bool EngineCore::knows(const Peer& peer) const {
  std::lock_guard lock(tables_mutex_);
  const auto known = peers_.find(peer.address().incarnation);
  return known != peers_.end() && known->second.get() == &peer;
}

void EngineCore::start_connect(Peer& peer) {
  assert_holder();
  if (peer.link_ != nullptr || closed()) return;
  if (peer.state() == PeerState::kLost && !peer.work_->is_worth_another_try) return;
  if (!knows(peer)) {  // begun before the peer was forgotten: there must be no second link to an engine
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
    while (take_submits() > 0) {  // earlier submits end with the rest
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
    std::lock_guard lock(tables_mutex_);
    for (auto& [id, region] : remote_regions_) {
      if (region->peer() == &peer) region->key_.reset();
    }
    std::erase_if(remote_regions_, [&](const auto& item) { return item.second->peer() == &peer; });
    keep_counts(peer);
    peers_.erase(peer.address().incarnation);
  });
  transfers_.drop_regions([&](const Peer& other) { return &other == &peer; });
}

std::vector<RemoteRegionRef> EngineCore::take_unused_remote_regions() {
  std::vector<RemoteRegionRef> unused;
  if (remote_regions_.size() < remote_regions_sweep_at_) return unused;
  for (auto at = remote_regions_.begin(); at != remote_regions_.end();) {
    // Nobody else can get a reference now: whoever wants one from the table asks under the mutex.
    if (!at->second->is_only_ref()) {
      ++at;
      continue;
    }
    unused.push_back(std::move(at->second));
    at = remote_regions_.erase(at);
  }
  remote_regions_sweep_at_ = std::max(kRemoteRegionsKept, 2 * remote_regions_.size());
  return unused;
}

std::vector<PeerRef> EngineCore::take_lost_peers() {
  std::vector<PeerRef> lost;
  if (peers_.size() < peers_sweep_at_) return lost;
  // Their regions reference them. One with a key is just being lost: on_link_down() will get to it.
  const auto is_unused = [](const auto& item) {
    const RemoteRegion& region = *item.second;
    return region.peer()->state() == PeerState::kLost && region.is_only_ref() && !region.key_;
  };
  std::erase_if(remote_regions_, is_unused);
  // Nobody else can get a reference now: whoever wants one from the table asks under the mutex.
  for (const auto& [incarnation, peer] : peers_) {
    if (peer->state() == PeerState::kLost && peer->is_only_ref()) lost.push_back(peer);
  }
  const size_t surplus = lost.size() - std::min(lost.size(), kLostPeersKept);
  std::ranges::sort(lost, {}, [](const PeerRef& peer) { return peer->track_->id; });  // the newest last
  lost.resize(surplus);
  for (const PeerRef& peer : lost) {
    keep_counts(*peer);
    peers_.erase(peer->address().incarnation);
  }
  peers_sweep_at_ = peers_.size() + kLostPeersKept;
  return lost;
}

std::vector<PeerRef> EngineCore::peers() {
  std::lock_guard lock(tables_mutex_);
  std::vector<PeerRef> peers;
  peers.reserve(peers_.size());
  for (const auto& [incarnation, peer] : peers_) peers.push_back(peer);
  return peers;
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
  run_as_holder([&] {
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
