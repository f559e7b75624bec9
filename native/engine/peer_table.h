// The peers that an engine knows, and what it knows of their regions.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "engine/region.h"
#include "engine/traffic.h"

namespace crossrail {

// Peers by incarnation, and their regions by incarnation and id. Peers that come and go for weeks without
// forget_peer(), and peers that show a new descriptor with each request, do not fill it: what nothing else refers to is
// removed, once there is much of it.
// Threads: any, except where it says progress holder.
// Invariant: a peer in the table is the only one of its incarnation. gone_counts_ has the counts of the peers that were
// in the table and are no longer.
class PeerTable {
 public:
  // By transport and rail.
  using GoneCounts = std::array<std::array<RailCounts, kRailsMax>, kTransportsMax>;

  // Null: it is not known. Throws UsageError if the address contradicts the known one of that incarnation.
  PeerRef find(const Address& address) const;
  // The known peer of that address; otherwise, adds the one that make() returns. Throws as find().
  PeerRef find_or_add(const Address& address, const std::function<PeerRef()>& make);
  // So many peers that the next one to be added removes lost ones.
  bool is_crowded() const;
  // In the table, not forgotten since.
  bool has(const Peer& peer) const;
  std::vector<PeerRef> peers() const;
  bool is_any_connecting() const;
  // All peers, and the counts of those that are gone, as of one moment.
  std::pair<std::vector<PeerRef>, GoneCounts> peers_and_gone_counts() const;
  // Progress holder.
  void remove(const Peer& peer);
  // Removes everything. Only once the engine is closed, when there is no progress holder any more.
  void clear();

  // The owner's region. A descriptor that differs from the known one of the same id gets an object of its own: it is
  // forged or stale, and the target checks it against the truth.
  RemoteRegionRef region(const PeerRef& owner, const RegionDescriptor& descriptor);
  size_t region_count() const;
  // Progress holder. The peer has no link any more: drops the transport's halves of its regions.
  void drop_keys(const Peer& peer);

 private:
  static constexpr size_t kRegionsKept = 1024;  // before the table is searched for unused ones
  static constexpr size_t kLostPeersKept = 64;  // otherwise unreferenced; kept for their counts, states and reasons

  // All under the mutex. The caller drops what the first two return after it has released that.
  std::vector<RemoteRegionRef> take_unused_regions();
  std::vector<PeerRef> take_lost_peers();
  PeerRef find_locked(const Address& address) const;
  void erase(const Peer& peer);

  mutable std::mutex mutex_;  // guards everything below
  std::map<Incarnation, PeerRef> peers_;
  std::map<std::pair<Incarnation, uint64_t>, RemoteRegionRef> regions_;
  size_t sweep_regions_at_ = kRegionsKept;  // entries
  size_t sweep_peers_at_ = 2 * kLostPeersKept;
  GoneCounts gone_counts_;
};

}  // namespace crossrail
