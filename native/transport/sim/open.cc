#include "transport/sim/open.h"

#include <mutex>

#include "transport/sim/sim_nic.h"
#include "transport/sim/world.h"
#include "util/errors.h"

namespace crossrail::sim {

std::vector<std::unique_ptr<rdma::Nic>> open_nics(const TransportOptions& options) {
  // The only simulation there is.
  auto* const world = static_cast<World*>(options.place.simulation);
  std::lock_guard lock(world->lock());
  const Host& host = world->fabric().host(options.place.host);
  std::vector<uint32_t> rails;
  for (const std::string& name : options.rails) {
    uint32_t rail = 0;
    while (rail < host.rails.size() && name != std::to_string(rail)) ++rail;
    if (rail == host.rails.size()) {
      throw UsageError("rails names '" + name + "', and host '" + host.name + "' has rails '0' to '" +
                       std::to_string(host.rails.size() - 1) + "'");
    }
    rails.push_back(rail);
  }
  if (rails.empty() && options.rail_count > host.rails.size()) {
    throw UsageError("rails = " + std::to_string(options.rail_count) + ", and host '" + host.name + "' has " +
                     std::to_string(host.rails.size()) + ": give the host more (nic=)");
  }
  for (uint32_t rail = 0; rails.size() < options.rail_count; ++rail) rails.push_back(rail);
  std::vector<std::unique_ptr<rdma::Nic>> nics;
  for (const uint32_t rail : rails) {
    nics.push_back(std::make_unique<SimNic>(world, options.place.actor, options.place.host, rail));
  }
  return nics;
}

}  // namespace crossrail::sim
