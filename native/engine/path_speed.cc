#include "engine/path_speed.h"

#include <algorithm>
#include <map>
#include <vector>

namespace crossrail {

namespace {

// The first of the rails that share this one's interface, as its representative.
uint32_t device_of(uint32_t rail, std::span<const std::string> devices) {
  if (rail >= devices.size()) return rail;
  return static_cast<uint32_t>(std::ranges::find(devices, devices[rail]) - devices.begin());
}

// The same for a peer's rails over tcp, which only IP addresses tell apart.
uint32_t address_of(uint32_t rail, TransportKind kind, const Address& peer) {
  const std::vector<Endpoint>& all = peer.endpoints;
  if (kind != TransportKind::kTcp || rail >= all.size()) return rail;
  const auto same = [&](const Endpoint& other) { return other.family == all[rail].family && other.ip == all[rail].ip; };
  return static_cast<uint32_t>(std::ranges::find_if(all, same) - all.begin());
}

}  // namespace

double expected_gb_per_s(std::span<const RailReport> pairs, TransportKind kind, const Address& own,
                         std::span<const std::string> own_devices, const Address& peer) {
  constexpr double kGbPerMbit = 1e-3 / 8;
  std::map<uint32_t, double> sent;                         // by each of our interfaces
  std::map<uint32_t, std::map<uint32_t, double>> offered;  // to each of the peer's, by each of ours paired with it
  for (const RailReport& pair : pairs) {
    const double own_mbps = own.speed_mbps_of(kind, pair.rail);
    if (own_mbps == 0 || peer.speed_mbps_of(kind, pair.peer_rail) == 0) return 0;
    const uint32_t ours = device_of(pair.rail, own_devices);
    sent[ours] = own_mbps;
    offered[address_of(pair.peer_rail, kind, peer)][ours] = own_mbps;
  }
  double sent_mbps = 0;
  for (const auto& [device, mbps] : sent) sent_mbps += mbps;
  double taken_mbps = 0;
  for (const auto& [rail, by] : offered) {
    double mbps = 0;
    for (const auto& [device, own_mbps] : by) mbps += own_mbps;
    taken_mbps += std::min<double>(mbps, peer.speed_mbps_of(kind, rail));
  }
  return std::min(sent_mbps, taken_mbps) * kGbPerMbit;
}

}  // namespace crossrail
