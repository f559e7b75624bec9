// The verbs transport's NICs: which ports there are, and an rdma::Nic for each one wanted. Present in every build;
// without libibverbs' headers it is implemented by absent.cc.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/rdma/nic.h"
#include "transport/transport.h"

namespace crossrail::verbs {

// A port of an RDMA device, as of when it was asked.
struct Port {
  std::string name;    // "mlx5_0:1"
  std::string device;  // "mlx5_0"
  uint8_t number = 0;
  bool is_active = false;
  std::string link_layer;   // "InfiniBand", "Ethernet"
  std::string netdev;       // of Ethernet ports: "eth2"; else empty
  std::string address;      // "10.0.0.1", "fe80::1"; InfiniBand: "lid 5"
  std::string gid_type;     // "RoCE v2", "RoCE v1", "InfiniBand"
  int gid_index = -1;       // the one that would be used
  uint32_t speed_mbps = 0;  // 0 unknown
  int numa_node = -1;       // -1 unknown
  bool is_hardware = true;  // false: Soft-RoCE and the like
  std::string trouble;      // why it cannot be used; empty: it can
};

// [any] All that libibverbs lists, in its order. Empty if the library is missing.
std::vector<Port> ports();

// [any] Empty: the library is installed and a port can be used. Else what is missing and what helps.
std::string missing();

// One Nic for each port that options.rails names. Without names: options.rail_count of them, 0 for one on each usable
// port; hardware comes before software, fast before slow, and if there are fewer ports than rails they are used in
// turn. Throws TransportError; UsageError for a name that matches nothing.
std::vector<std::unique_ptr<rdma::Nic>> open_nics(const TransportOptions& options);

}  // namespace crossrail::verbs
