#include "engine/peer_table.h"

#include <algorithm>
#include <memory>
#include <string>
#include <tuple>

#include "engine/flight_recorder.h"
#include "util/errors.h"
#include "util/mutation.h"

namespace crossrail {

namespace {

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

std::vector<PeerRef> all_of(const std::map<Incarnation, PeerRef>& table) {
  std::vector<PeerRef> peers;
  peers.reserve(table.size());
  for (const auto& [incarnation, peer] : table) peers.push_back(peer);
  return peers;
}

}  // namespace

// --- peers ---

PeerRef PeerTable::find_locked(const Address& address) const {
  const auto known = peers_.find(address.incarnation);
  if (known == peers_.end()) return nullptr;
  check_same(*known->second, address);
  return known->second;
}

PeerRef PeerTable::find(const Address& address) const {
  std::lock_guard lock(mutex_);
  return find_locked(address);
}

PeerRef PeerTable::find_or_add(const Address& address, const std::function<PeerRef()>& make) {
  std::vector<PeerRef> lost;  // dropped after the mutex
  std::lock_guard lock(mutex_);
  if (is_mutated(Mutation::kAcceptStaleIncarnation)) {
    for (auto& [incarnation, known] : peers_) {
      if (known->address().name == address.name) return known;
    }
  }
  if (PeerRef known = find_locked(address)) return known;
  lost = take_lost_peers();
  return peers_.emplace(address.incarnation, make()).first->second;
}

bool PeerTable::is_crowded() const {
  std::lock_guard lock(mutex_);
  return peers_.size() >= sweep_peers_at_;
}

bool PeerTable::has(const Peer& peer) const {
  std::lock_guard lock(mutex_);
  const auto known = peers_.find(peer.address().incarnation);
  return known != peers_.end() && known->second.get() == &peer;
}

std::vector<PeerRef> PeerTable::peers() const {
  std::lock_guard lock(mutex_);
  return all_of(peers_);
}

bool PeerTable::is_any_connecting() const {
  std::lock_guard lock(mutex_);
  return std::ranges::any_of(peers_, [](const auto& item) { return item.second->state() == PeerState::kConnecting; });
}

std::pair<std::vector<PeerRef>, PeerTable::GoneCounts> PeerTable::peers_and_gone_counts() const {
  std::lock_guard lock(mutex_);
  return {all_of(peers_), gone_counts_};
}

void PeerTable::remove(const Peer& peer) {
  drop_keys(peer);
  std::lock_guard lock(mutex_);
  std::erase_if(regions_, [&](const auto& item) { return item.second->peer() == &peer; });
  erase(peer);
}

void PeerTable::clear() {
  std::lock_guard lock(mutex_);
  // Completed transfers keep their region for the next use: the transport's half of it is destroyed here.
  for (auto& [id, region] : regions_) region->key_.reset();
  regions_.clear();
  peers_.clear();
}

// Its counts stay, so that a rail's counts never shrink. A peer that was forgotten before is not there, but one that
// was added since may be.
void PeerTable::erase(const Peer& peer) {
  const auto known = peers_.find(peer.address().incarnation);
  if (known == peers_.end() || known->second.get() != &peer) return;
  const PeerTrack& track = *peer.track_;
  for (uint32_t rail = 0; rail < track.rail_count; ++rail) gone_counts_[peer.route_.index][rail].add(track.rails[rail]);
  peers_.erase(known);
}

std::vector<PeerRef> PeerTable::take_lost_peers() {
  std::vector<PeerRef> lost;
  if (peers_.size() < sweep_peers_at_) return lost;
  // Their regions reference them. One with a key is just being lost: drop_keys() will get to it.
  const auto is_unused = [](const auto& item) {
    const RemoteRegion& region = *item.second;
    return region.peer()->state() == PeerState::kLost && region.is_only_ref() && !region.key_;
  };
  std::erase_if(regions_, is_unused);
  // Nobody else can get a reference now: whoever wants one from the table asks under the mutex.
  for (const auto& [incarnation, peer] : peers_) {
    if (peer->state() == PeerState::kLost && peer->is_only_ref()) lost.push_back(peer);
  }
  const size_t surplus = lost.size() - std::min(lost.size(), kLostPeersKept);
  std::ranges::sort(lost, {}, [](const PeerRef& peer) { return peer->track_->id; });  // the newest last
  lost.resize(surplus);
  for (const PeerRef& peer : lost) erase(*peer);
  sweep_peers_at_ = peers_.size() + kLostPeersKept;
  return lost;
}

// --- their regions ---

RemoteRegionRef PeerTable::region(const PeerRef& owner, const RegionDescriptor& descriptor) {
  std::vector<RemoteRegionRef> unused;  // dropped after the mutex
  std::lock_guard lock(mutex_);
  unused = take_unused_regions();
  const std::pair id(descriptor.owner.incarnation, descriptor.region_id);
  const auto known = regions_.find(id);
  if (known != regions_.end() && known->second->descriptor() == descriptor) return known->second;
  auto fresh = RemoteRegionRef::adopt(new RemoteRegion(owner, descriptor));
  if (known == regions_.end()) regions_.emplace(id, fresh);
  return fresh;
}

size_t PeerTable::region_count() const {
  std::lock_guard lock(mutex_);
  return regions_.size();
}

void PeerTable::drop_keys(const Peer& peer) {
  std::lock_guard lock(mutex_);
  for (auto& [id, region] : regions_) {
    if (region->peer() == &peer) region->key_.reset();
  }
}

std::vector<RemoteRegionRef> PeerTable::take_unused_regions() {
  std::vector<RemoteRegionRef> unused;
  if (regions_.size() < sweep_regions_at_) return unused;
  for (auto at = regions_.begin(); at != regions_.end();) {
    // Nobody else can get a reference now: whoever wants one from the table asks under the mutex.
    if (!at->second->is_only_ref()) {
      ++at;
      continue;
    }
    unused.push_back(std::move(at->second));
    at = regions_.erase(at);
  }
  sweep_regions_at_ = std::max(kRegionsKept, 2 * regions_.size());
  return unused;
}

}  // namespace crossrail
