// The verbs transport's NICs: which ports there are, and one rdma::Nic for each that is wanted. Present in every build;
// one without libibverbs' headers has absent.cc behind it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/rdma/nic.h"
#include "transport/transport.h"

namespace crossrail::verbs {

// A port of an RDMA device, as it was when asked.
struct Port {
  std::string name;    // "mlx5_0:1"
  std::string device;  // "mlx5_0"
  uint8_t number = 0;
  bool is_active = false;
  std::string link_layer;   // "InfiniBand", "Ethernet"
  std::string netdev;       // of Ethernet ports: "eth2"; else empty
  std::string address;      // "10.0.0.1", "fe80::1"; InfiniBand: "lid 5"
  std::string gid_type;     // "RoCE v2", "RoCE v1", "InfiniBand"
  int gid_index = -1;       // the one that would be taken
  uint32_t speed_mbps = 0;  // 0 unknown
  int numa_node = -1;       // -1 unknown
  bool is_hardware = true;  // false: Soft-RoCE and the like
  std::string trouble;      // why it cannot be used; empty: it can
};

// [any] All that libibverbs lists, in its order. Empty where it is missing.
std::vector<Port> ports();

// [any] Empty: the library is here and a port can be used. Else what is missing and what helps.
std::string missing();

// One Nic for each port that options.rails names. Without names: options.rail_count of them, 0 for one on each usable
// port; hardware comes before software, fast before slow, and where there are fewer ports than rails they are taken in
// turns. Throws TransportError; UsageError for a name that is nothing here.
std::vector<std::unique_ptr<rdma::Nic>> open_nics(const TransportOptions& options);

}  // namespace crossrail::verbs
