#include "transport/ofi/open.h"

#include "transport/ofi/nic.h"
#include "util/errors.h"

namespace crossrail::ofi {

namespace {

Rules wanted_rules(const std::string& provider) {
  Rules rules = rules_for(provider.empty() ? "efa" : provider);
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
  const Rules rules = wanted_rules(provider);
  std::vector<Candidate> found;
  for (const Device& device : devices(*open_library(), rules)) {
    found.push_back({device.name, device.device, device.netdev, device.pci, rules.uses_ip ? device.name : "",
                     device.speed_mbps, rules.placed_by_software});
  }
  return found;
}

std::string missing(const std::string& provider) {
  try {
    const auto library = open_library();
    const Rules rules = wanted_rules(provider);
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
  const Rules rules = wanted_rules(options.rdma.provider);
  std::vector<std::unique_ptr<rdma::Nic>> nics;
  for (Device& device : choose(*library, rules, options.rails, options.rail_count))
    nics.push_back(std::make_unique<OfiNic>(library, rules, std::move(device)));
  return nics;
}

}  // namespace crossrail::ofi
