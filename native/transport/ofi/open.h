// The way to libfabric's NICs, for transport/open.cc, doctor and topo.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/ofi/library.h"
#include "transport/rdma/nic.h"
#include "transport/transport.h"

namespace crossrail::ofi {

// What libfabric there is; for tests, which are left out where there is none.
struct Presence {
  bool found = false;
  std::string path;
  std::string version;  // "2.5"
  std::string missing;  // why there is none, and what to do
};
Presence presence();

struct Candidate {
  std::string name;    // for rails=
  std::string device;  // "rdmap0s6"; empty for IP addresses
  std::string netdev;
  std::string pci;
  std::string ip;
  uint32_t speed_mbps = 0;
  bool is_software = false;  // the host's processors do what a NIC would
};
// What could be rails of a provider ("efa", "tcp" ...; empty: EFA). Empty: none. Throws TransportError without a
// libfabric.
std::vector<Candidate> candidates(const std::string& provider);

// Empty when the provider has at least one device; else why not, and what to do.
std::string missing(const std::string& provider);

// A NIC for each rail that the options ask for: RdmaOptions::provider (empty: EFA), rails, rail_count.
// Throws UsageError for a rail that is none, TransportError else.
std::vector<std::unique_ptr<rdma::Nic>> open_nics(const TransportOptions& options);

}  // namespace crossrail::ofi
