// Access to libfabric's NICs, for transport/open.cc, doctor and topo.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/ofi/library.h"
#include "transport/rdma/nic.h"
#include "transport/transport.h"

namespace crossrail::ofi {

// The libfabric that was found; for tests, which are skipped without one.
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
  bool is_software = false;  // the host's processors do the work of a NIC
};
// Possible rails of a provider ("efa", "tcp" ...; empty: EFA). Empty: none. Throws TransportError without libfabric.
std::vector<Candidate> candidates(const std::string& provider);

// Empty if the provider has at least one device; else why not, and what to do.
std::string missing(const std::string& provider);

// A NIC for each rail that the options ask for: RdmaOptions::provider (empty: EFA), rails, rail_count. Throws
// UsageError for an invalid rail, TransportError otherwise.
std::vector<std::unique_ptr<rdma::Nic>> open_nics(const TransportOptions& options);

}  // namespace crossrail::ofi
