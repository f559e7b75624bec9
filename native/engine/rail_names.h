// What rails= means when one list serves several transports. Pure.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "transport/open.h"

namespace crossrail {

struct RailNames {
  std::vector<std::string> rdma;  // ports of an RDMA transport: device, port, interface or IP address
  std::vector<std::string> tcp;   // everything that is or has an interface: a device's name becomes its interface's
};

// Keeps the order, and names each rail once.
RailNames split_rail_names(std::span<const std::string> names, std::span<const RdmaPort> ports);

}  // namespace crossrail
