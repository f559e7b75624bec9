// What rails= means if one list serves several transports. Pure.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "transport/open.h"

namespace crossrail {

struct RailNames {
  std::vector<std::string> rdma;  // those that are ports of an RDMA transport: device, port, interface or IP address
  std::vector<std::string> tcp;   // all that have an interface or are one: a device's name becomes its interface's
};

// Order is kept, and each rail is named once.
RailNames split_rail_names(std::span<const std::string> names, std::span<const RdmaPort> ports);

}  // namespace crossrail
