// The ports of an RDMA device: state, link, and which of its addresses (GIDs) a port is used under.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "transport/transport.h"
#include "transport/verbs/handles.h"
#include "transport/verbs/open.h"
#include "transport/verbs/wire.h"

namespace crossrail::verbs {

struct PortDetail {
  Port port;
  Endpoint endpoint;  // its queue pair is filled in later
  uint64_t work_bytes_max = 0;
  uint16_t partition_index = 0;        // in the port's table of P_Keys
  std::vector<std::string> addresses;  // all addresses that it could be used under,
  std::vector<std::string> netdevs;    // and the interfaces they belong to: the port's own, VLANs on it
};

// A device that libibverbs lists; its context is null if it could not be opened, with the reason in `trouble`.
struct Device {
  std::string name;
  Context context;
  std::string trouble;
};

// [any] only: the name of the one wanted; empty: all.
std::vector<Device> open_devices(const std::string& only = {});

// [any] only: consider GIDs of this IP address or interface; empty: the best.
std::vector<PortDetail> inspect_ports(const Device& device, const RdmaOptions& options, const std::string& only);

// [any] Those that open_nics() opens for these options, in its order; not empty. Throws as it does.
std::vector<PortDetail> choose_ports(const std::vector<Device>& devices, const TransportOptions& options);

// The port's present speed, 0 unknown. A port that is down reports what its slowest lane could do.
uint32_t speed_mbps_now(const Port& port);

// The present index of the port's GID; nothing: the port is not active, or no longer has the address that peers know.
std::optional<int> gid_index_now(ibv_context* context, const PortDetail& detail);

}  // namespace crossrail::verbs
