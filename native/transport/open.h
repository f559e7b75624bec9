// The one switch from kind to implementation, and the questions to ask of a kind before it is opened.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace crossrail {

// `sink` must outlive the transport. Throws TransportError.
std::unique_ptr<Transport> open_transport(TransportKind kind, const TransportOptions& options, Sink* sink);

// Whether this build carries it at all; of verbs: whether libibverbs' headers were there.
bool is_built(TransportKind kind);

// A port (verbs) or domain (ofi) of this machine that could be a rail.
struct RdmaPort {
  std::string name;          // what rails= calls it: "mlx5_0:1", "rdmap0s6-rdm"
  std::string device;        // "mlx5_0"
  std::string netdev;        // "eth2"; empty: none
  std::string ip;            // of the netdev, as text; empty: none
  std::string trouble;       // why it is no rail now; empty: it could be one
  bool is_software = false;  // slower than tcp: never chosen by itself
};
// Of the kind's devices, of ofi those of the provider (empty: efa). None where the library is missing.
std::vector<RdmaPort> rdma_ports(TransportKind kind, const std::string& provider);

// Why `kind` (verbs or ofi) has no rail here: no library, no device; empty: it has.
std::string rdma_missing(TransportKind kind, const std::string& provider);

}  // namespace crossrail
