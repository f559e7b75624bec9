#include "transport/ofi/open.h"

#include "transport/ofi/nic.h"
#include "util/errors.h"

namespace crossrail::ofi {

namespace {

// Without a name EFA, through efa-direct if this library and its devices have it: one operation is one work request,
// the provider has no handshake of its own, and closing an endpoint waits for nobody. (libfabric's fi_getinfo lists it
// first, and NCCL's plugin uses it: prov/efa/docs/efa_fabric_comparison.md.)
Rules wanted_rules(const Library& library, const std::string& provider) {
  if (provider.empty()) {
    const Rules direct = rules_for("efa-direct");
    return devices(library, direct).empty() ? rules_for("efa") : direct;
  }
  Rules rules = rules_for(provider);
  if (!rules.refused.empty()) throw UsageError("transport='ofi:" + rules.name + "' is refused: " + rules.refused);
  return rules;
}

}  // namespace

Presence presence() {
  Presence found;
  try {
    const auto library = open_library();
    found.found = true;
    found.path = library->path;
    found.version = library->version_text();
  } catch (const TransportError& error) {
    found.missing = error.what();
  }
  return found;
}

std::vector<Candidate> candidates(const std::string& provider) {
  const auto library = open_library();
  const Rules rules = wanted_rules(*library, provider);
  std::vector<Candidate> found;
  for (const Device& device : devices(*library, rules)) {
    found.push_back({device.name, device.device, device.netdev, device.pci, rules.uses_ip ? device.name : "",
                     device.speed_mbps, rules.placed_by_software});
  }
  return found;
}

std::string missing(const std::string& provider) {
  try {
    const auto library = open_library();
    const Rules rules = wanted_rules(*library, provider);
    choose(*library, rules, {}, 1);
    return {};
  } catch (const TransportError& error) {
    return error.what();
  } catch (const UsageError& error) {
    return error.what();
  }
}

std::vector<std::unique_ptr<rdma::Nic>> open_nics(const TransportOptions& options) {
  const auto library = open_library();
  const Rules rules = wanted_rules(*library, options.rdma.provider);
  std::vector<std::unique_ptr<rdma::Nic>> nics;
  for (Device& device : choose(*library, rules, options.rails, options.rail_count))
    nics.push_back(std::make_unique<OfiNic>(library, rules, std::move(device)));
  return nics;
}

}  // namespace crossrail::ofi
