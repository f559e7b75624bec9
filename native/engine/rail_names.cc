#include "engine/rail_names.h"

#include <algorithm>

namespace crossrail {

namespace {

void add_once(std::vector<std::string>* names, const std::string& name) {
  if (!name.empty() && std::ranges::find(*names, name) == names->end()) names->push_back(name);
}

}  // namespace

RailNames split_rail_names(std::span<const std::string> names, std::span<const RdmaPort> ports) {
  RailNames split;
  for (const std::string& name : names) {
    bool is_device = false;
    for (const RdmaPort& port : ports) {
      const bool by_device = name == port.name || name == port.device;
      if (!by_device && name != port.netdev && name != port.ip) continue;
      add_once(&split.rdma, name);
      // A device without an interface (InfiniBand, EFA) means nothing to tcp.
      if (by_device) add_once(&split.tcp, port.netdev);
      is_device = is_device || by_device;
    }
    if (!is_device) add_once(&split.tcp, name);
  }
  return split;
}

}  // namespace crossrail
