// The one switch from kind to implementation, and queries about a kind before it is opened.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace crossrail {

// `sink` must outlive the transport. Throws TransportError.
std::unique_ptr<Transport> open_transport(TransportKind kind, const TransportOptions& options, Sink* sink);

// Whether this build contains the transport at all; for verbs: whether the headers of libibverbs were found.
bool is_built(TransportKind kind);

// A port (verbs) or domain (ofi) of this machine that could serve as a rail.
struct RdmaPort {
  std::string name;          // its name in rails=: "mlx5_0:1", "rdmap0s6-rdm"
  std::string device;        // "mlx5_0"
  std::string netdev;        // "eth2"; empty: none
  std::string ip;            // of the netdev, as text; empty: none
  std::string trouble;       // why it cannot be a rail now; empty: it can
  bool is_software = false;  // slower than tcp: never chosen automatically
};
// The ports of this kind; for ofi, those of the provider (empty: efa). None if the library is missing.
std::vector<RdmaPort> rdma_ports(TransportKind kind, const std::string& provider);

// Why `kind` (verbs or ofi) has no rail here: no library, or no device. Empty: it has one.
std::string rdma_missing(TransportKind kind, const std::string& provider);

}  // namespace crossrail
