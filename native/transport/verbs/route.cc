#include "transport/verbs/route.h"

#include <algorithm>
#include <cstring>

namespace crossrail::verbs {

namespace {

constexpr uint8_t kHopsMax = 64;

}  // namespace

ibv_ah_attr route_to(const Adapter& adapter, const Endpoint& endpoint) {
  const Endpoint& ours = adapter.detail.endpoint;
  ibv_ah_attr route{};
  route.port_num = adapter.detail.port.number;
  route.sl = static_cast<uint8_t>(adapter.options.service_level);
  route.dlid = endpoint.lid;
  // InfiniBand's own routing is by lid, within a subnet: the upper half of the GIDs is the same.
  const bool crosses = !std::equal(ours.gid.begin(), ours.gid.begin() + 8, endpoint.gid.begin());
  if (adapter.detail.wants_global_route || crosses) {
    route.is_global = 1;
    std::memcpy(route.grh.dgid.raw, endpoint.gid.data(), endpoint.gid.size());
    route.grh.sgid_index = static_cast<uint8_t>(adapter.detail.port.gid_index);
    route.grh.hop_limit = kHopsMax;
    route.grh.traffic_class = static_cast<uint8_t>(adapter.options.traffic_class);
  }
  return route;
}

}  // namespace crossrail::verbs
