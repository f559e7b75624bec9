#include "transport/verbs/route.h"

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
  // InfiniBand's own routing is by LID, within a subnet.
  const bool crosses = ours.fabric == Fabric::kInfiniBand && !share_subnet(ours.gid, endpoint.gid);
  route.dlid = crosses ? router_lid(endpoint.gid) : endpoint.lid;
  // Either end may require it: functions of one NIC may share a LID, and then only the GID tells packets to them apart
  // (IBV_QPF_GRH_REQUIRED, ibv_query_port(3)).
  if (ours.wants_global_route || endpoint.wants_global_route || crosses) {
    route.is_global = 1;
    std::memcpy(route.grh.dgid.raw, endpoint.gid.data(), endpoint.gid.size());
    route.grh.sgid_index = static_cast<uint8_t>(adapter.gid_index.load(std::memory_order_relaxed));
    route.grh.hop_limit = kHopsMax;
    route.grh.traffic_class = static_cast<uint8_t>(adapter.options.traffic_class);
  }
  return route;
}

}  // namespace crossrail::verbs
