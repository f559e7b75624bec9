// libfabric's providers as we use them: the measured properties of each, and the devices that it offers on this host.
#pragma once

#include <rdma/fabric.h>

#include <memory>
#include <string>
#include <vector>

#include "transport/ofi/library.h"

namespace crossrail::ofi {

// How to use a provider. Properties that are not known are set to the safe side.
struct Rules {
  std::string name;      // the name for users; RdmaRails::fabric
  std::string provider;  // fabric_attr->prov_name, exactly: a hint of "tcp" also finds "tcp;ofi_rxm"
  std::string fabric;    // fabric_attr->name where the provider has several kinds, else empty
  bool is_efa = false;   // options and error codes of that provider
  uint8_t way = 0;       // if several lead to the same devices: part of the endpoint, and only equal ones communicate
  bool uses_ip = false;  // its devices are IP addresses
  // Works for one peer cannot be cancelled. So either each path has an endpoint of its own, which is closed (exact, but
  // costs a queue pair or a socket per peer), or all share one that is replaced when a path with unfinished works ends.
  bool endpoint_per_path = true;
  // Paths are connections (FI_EP_MSG): one listens for each NIC, one side dials, the other accepts. Else endpoints are
  // reliable datagram ones (FI_EP_RDM), which know peers by an address vector.
  bool connects = false;
  // Its endpoints execute writes in the order of posting, and end a connection at the first error.
  bool ordered = false;
  // Completions must be requested as FI_DELIVERY_COMPLETE: default ones only say that the bytes were passed on.
  bool delivery_complete = true;
  // The provider, not a NIC, places peers' bytes: closing a registration does not end what is being placed.
  bool placed_by_software = true;
  // Its queue's descriptor can be slept on. Not those of layered providers (tcp;ofi_rxm): epoll sets nested as deeply
  // as the kernel allows, and ours would add a level. Nor efa's, if a version has one (efa-direct since 2.2, efa since
  // 2.4): a queue that can be slept on is read through a software queue.
  bool has_descriptor = true;
  bool keeps_doorbell = false;  // FI_MORE is worth using
  std::string unproven;         // what is unproven about it, for users; empty: our tests run on it
  std::string refused;          // why it is not used at all; empty: it is used
};
// provider: "tcp", "efa", "efa-direct", any other name of libfabric's.
Rules rules_for(const std::string& provider);

struct FreeInfo {
  decltype(&::fi_freeinfo) free = nullptr;
  void operator()(fi_info* info) const { free(info); }
};
using Info = std::unique_ptr<fi_info, FreeInfo>;

// One device that can be a rail.
struct Device {
  Info info;
  std::string name;    // what rails= calls it: an IP address, "rdmap0s6-rdm"
  std::string device;  // "rdmap0s6", empty unknown
  std::string netdev;
  std::string pci;          // "0000:00:06.0", empty unknown
  uint32_t speed_mbps = 0;  // 0 unknown
  uint8_t prefix_bits = 0;  // of the IP network it is in
  bool is_loopback = false;
};

// All devices of the provider, fast ones first; for tcp, one per address of this host. Empty: none.
std::vector<Device> devices(const Library& library, const Rules& rules);
// The devices selected by names (addresses, devices, interfaces), in that order; without names the first `count`, 0:
// all; IP addresses are repeated to reach it (127.0.0.1, 127.0.0.2 ... on hosts without a network). Throws UsageError
// for a name that matches nothing, TransportError if the provider has no device.
std::vector<Device> choose(const Library& library, const Rules& rules, const std::vector<std::string>& names,
                           uint32_t count);

}  // namespace crossrail::ofi
