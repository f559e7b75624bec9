// The NICs of an engine in a simulated world.
#pragma once

#include <memory>
#include <vector>

#include "transport/rdma/nic.h"
#include "transport/transport.h"

namespace crossrail::sim {

// The first options.rail_count rails of its host, or those named by options.rails: "0", "1". Throws UsageError.
std::vector<std::unique_ptr<rdma::Nic>> open_nics(const TransportOptions& options);

}  // namespace crossrail::sim
