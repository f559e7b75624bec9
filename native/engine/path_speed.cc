#include "engine/path_speed.h"

#include <algorithm>
#include <map>

namespace crossrail {

double expected_gb_per_s(std::span<const RailReport> pairs, TransportKind kind, const Address& own,
                         const Address& peer) {
  constexpr double kGbPerMbit = 1e-3 / 8;
  std::map<uint32_t, double> own_rails;
  std::map<uint32_t, double> offered;  // to each of the peer's rails, by those of ours that are paired with it
  for (const RailReport& pair : pairs) {
    const double own_mbps = own.speed_mbps_of(kind, pair.rail);
    if (own_mbps == 0 || peer.speed_mbps_of(kind, pair.peer_rail) == 0) return 0;
    own_rails[pair.rail] = own_mbps;
    offered[pair.peer_rail] += own_mbps;
  }
  double sent_mbps = 0;
  for (const auto& [rail, mbps] : own_rails) sent_mbps += mbps;
  double taken_mbps = 0;
  for (const auto& [rail, mbps] : offered) taken_mbps += std::min<double>(mbps, peer.speed_mbps_of(kind, rail));
  return std::min(sent_mbps, taken_mbps) * kGbPerMbit;
}

}  // namespace crossrail
