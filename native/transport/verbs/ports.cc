#include "transport/verbs/ports.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <optional>

#include "util/errors.h"

namespace crossrail::verbs {

namespace {

constexpr size_t kGidsMax = 512;
constexpr ibv_mtu kMtuMin = IBV_MTU_1024;  // a datagram is one packet
static_assert(rdma::kDatagramBytesMax <= 1024);
constexpr uint32_t kGidIndexMax = 255;  // the largest that a route can hold (ibv_global_route)

struct Candidate {
  uint32_t index = 0;
  uint32_t netdev_index = 0;
  Fabric fabric = Fabric::kInfiniBand;
  Gid gid{};
  uint8_t prefix_bits = 0;  // RoCE: of its network; 0: the address is not in this network namespace
};

// "100 Gb/sec (4X EDR)".
uint32_t rate_mbps(const std::string& device, uint32_t port) {
  std::ifstream file("/sys/class/infiniband/" + device + "/ports/" + std::to_string(port) + "/rate");
  double gigabits = 0;
  file >> gigabits;
  return gigabits > 0 && gigabits < 1e6 ? static_cast<uint32_t>(gigabits * 1000) : 0;
}

int numa_node(const std::string& device) {
  std::ifstream file("/sys/class/infiniband/" + device + "/device/numa_node");
  int node = -1;
  return file >> node ? node : -1;
}

// A simulated device has no hardware device behind it.
bool is_hardware(const std::string& device) {
  return ::access(("/sys/class/infiniband/" + device + "/device").c_str(), F_OK) == 0;
}

Fabric fabric_of(uint32_t gid_type) {
  switch (static_cast<ibv_gid_type>(gid_type)) {
    case IBV_GID_TYPE_IB:
      return Fabric::kInfiniBand;
    case IBV_GID_TYPE_ROCE_V1:
      return Fabric::kRoceV1;
    case IBV_GID_TYPE_ROCE_V2:
      return Fabric::kRoceV2;
  }
  return Fabric::kInfiniBand;
}

std::vector<Candidate> gids_of(ibv_context* context, uint32_t port) {
  std::vector<ibv_gid_entry> entries(kGidsMax);
  const ssize_t count = library().query_gid_table(context, entries.data(), entries.size(), 0, sizeof(ibv_gid_entry));
  std::vector<Candidate> found;
  for (ssize_t i = 0; i < count; ++i) {
    const ibv_gid_entry& entry = entries[static_cast<size_t>(i)];
    if (entry.port_num != port) continue;
    Candidate candidate{entry.gid_index, entry.ndev_ifindex, fabric_of(entry.gid_type), {}, 0};
    std::memcpy(candidate.gid.data(), entry.gid.raw, candidate.gid.size());
    found.push_back(candidate);
  }
  return found;
}

uint8_t ones(const void* bytes, size_t count) {
  uint8_t bits = 0;
  for (size_t i = 0; i < count; ++i)
    bits = static_cast<uint8_t>(bits + __builtin_popcount(static_cast<const uint8_t*>(bytes)[i]));
  return bits;
}

// The addresses of this network namespace, as GIDs, each with the prefix length of its network.
std::map<Gid, uint8_t> own_addresses() {
  std::map<Gid, uint8_t> found;
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return found;
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, ::freeifaddrs);
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || entry->ifa_netmask == nullptr) continue;
    Gid gid{};
    if (entry->ifa_addr->sa_family == AF_INET) {
      gid[10] = gid[11] = 0xff;
      std::memcpy(gid.data() + 12, &reinterpret_cast<const sockaddr_in*>(entry->ifa_addr)->sin_addr, 4);
      found.emplace(gid, ones(&reinterpret_cast<const sockaddr_in*>(entry->ifa_netmask)->sin_addr, 4));
    } else if (entry->ifa_addr->sa_family == AF_INET6) {
      std::memcpy(gid.data(), &reinterpret_cast<const sockaddr_in6*>(entry->ifa_addr)->sin6_addr, 16);
      found.emplace(gid, ones(&reinterpret_cast<const sockaddr_in6*>(entry->ifa_netmask)->sin6_addr, 16));
    }
  }
  return found;
}

// Smaller is better. RoCE v2 before v1, since only v2 is routed. Then addresses of this network namespace: the table
// also lists those of others (a pod's own next to the host's and other pods', on one port by macvlan), which NVIDIA's
// own driver refuses (rdma_check_gid_user_access: ENODEV when a queue pair is connected), and with which packets would
// leave under somebody else's address with other drivers. Then IPv4, since hosts are mostly reached by it.
int rank(const Candidate& candidate) {
  if (candidate.fabric == Fabric::kInfiniBand && router_lid(candidate.gid) != 0)
    return 0;  // reached across subnets, too
  const int address = is_mapped_ipv4(candidate.gid) ? 0 : is_link_local(candidate.gid) ? 2 : 1;
  return (candidate.fabric == Fabric::kRoceV1 ? 10 : 0) + (candidate.prefix_bits == 0 ? 3 : 0) + address;
}

bool better(const Candidate& a, const Candidate& b) {
  return rank(a) != rank(b) ? rank(a) < rank(b) : a.index < b.index;
}

struct Partition {
  uint16_t index = 0;  // in the port's table
  uint16_t key = kDefaultPartition;
};

// The requested one, else the first that the port is a full member of, as UCX does: limited members do not hear each
// other, and the order of the table is up to the subnet manager (Azure: 0x800b and 0x7fff in either order).
std::optional<Partition> choose_partition(ibv_context* context, const ibv_port_attr& attributes, uint8_t port,
                                          uint32_t wanted) {
  constexpr uint16_t kNumber = 0x7fff;
  std::optional<Partition> best;
  for (uint16_t index = 0; index < attributes.pkey_tbl_len; ++index) {
    __be16 raw = 0;
    if (library().query_pkey(context, port, index, &raw) != 0) continue;
    const uint16_t key = ntohs(raw);
    if ((key & kNumber) == 0 || (wanted != 0 && (key & kNumber) != (wanted & kNumber))) continue;
    if ((key & kFullMember) != 0) return Partition{index, key};
    if (!best) best = Partition{index, key};
  }
  if (best || wanted != 0) return best;
  return Partition{};  // a table that says nothing
}

std::string hex(uint32_t number) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%x", number);
  return text;
}

std::string netdev_name(uint32_t index) {
  char name[IF_NAMESIZE] = "";
  return index != 0 && ::if_indextoname(index, name) != nullptr ? name : "";
}

const Candidate* choose(std::vector<Candidate>& gids, const RdmaOptions& options, const std::string& only) {
  std::sort(gids.begin(), gids.end(), better);
  for (const Candidate& candidate : gids) {
    if (candidate.index > kGidIndexMax) continue;
    if (options.gid_index >= 0 && candidate.index != static_cast<uint32_t>(options.gid_index)) continue;
    if (!only.empty() && address_text(candidate.gid) != only && netdev_name(candidate.netdev_index) != only) continue;
    return &candidate;
  }
  return nullptr;
}

uint8_t mtu_of(const ibv_port_attr& attributes, const RdmaOptions& options) {
  auto mtu = static_cast<uint8_t>(attributes.active_mtu);
  for (uint8_t i = 1; i <= 5; ++i)
    if (options.path_mtu_bytes == 128u << i) mtu = std::min(mtu, i);
  return mtu;
}

PortDetail inspect(const Device& device, uint8_t number, const RdmaOptions& options, const std::string& only) {
  PortDetail detail;
  Port& port = detail.port;
  port.name = device.name + ":" + std::to_string(number);
  port.device = device.name;
  port.number = number;
  port.numa_node = numa_node(device.name);
  port.is_hardware = is_hardware(device.name);
  port.speed_mbps = rate_mbps(device.name, number);
  ibv_port_attr attributes;
  if (const int error = query_port(device.context.get(), number, &attributes); error != 0) {
    port.trouble = std::string("cannot query the port: ") + std::strerror(error);
    return detail;
  }
  const bool is_ethernet = attributes.link_layer == IBV_LINK_LAYER_ETHERNET;
  port.link_layer = is_ethernet ? "Ethernet" : "InfiniBand";
  port.is_active = attributes.state == IBV_PORT_ACTIVE;
  detail.work_bytes_max = attributes.max_msg_sz;
  detail.endpoint.wants_global_route = is_ethernet || (attributes.flags & IBV_QPF_GRH_REQUIRED) != 0;

  std::vector<Candidate> gids = gids_of(device.context.get(), number);
  const std::map<Gid, uint8_t> own = is_ethernet ? own_addresses() : std::map<Gid, uint8_t>{};
  for (Candidate& candidate : gids) {
    const auto found = own.find(candidate.gid);
    if (found != own.end()) candidate.prefix_bits = found->second;
  }
  const Candidate* chosen = choose(gids, options, only);
  for (const Candidate& candidate : gids) {
    detail.addresses.push_back(address_text(candidate.gid));
    if (std::string netdev = netdev_name(candidate.netdev_index); !netdev.empty()) detail.netdevs.push_back(netdev);
  }
  if (chosen == nullptr) {
    port.trouble = options.gid_index >= 0 ? "it has no GID " + std::to_string(options.gid_index)
                   : only.empty()         ? "it has no GID; give its network interface an IP address"
                                          : "no GID of it that can be used is of " + only;
    return detail;
  }
  port.gid_index = static_cast<int>(chosen->index);
  port.netdev = netdev_name(chosen->netdev_index);
  detail.endpoint.fabric = is_ethernet ? chosen->fabric : Fabric::kInfiniBand;
  detail.endpoint.mtu = mtu_of(attributes, options);
  detail.endpoint.gid = chosen->gid;
  detail.endpoint.lid = is_ethernet ? uint16_t{0} : attributes.lid;
  detail.endpoint.prefix_bits = chosen->prefix_bits;
  const std::optional<Partition> partition =
      is_ethernet ? Partition{} : choose_partition(device.context.get(), attributes, number, options.partition);
  if (partition) {
    detail.partition_index = partition->index;
    detail.endpoint.partition = partition->key;
  }
  port.gid_type = fabric_name(detail.endpoint.fabric);
  port.address = is_ethernet ? address_text(chosen->gid) : "lid " + std::to_string(attributes.lid);
  if (!port.is_active) port.trouble = "the port is down";
  if (!is_ethernet && attributes.lid == 0) {  // peers would never learn it
    port.gid_index = -1;
    port.trouble = "the subnet manager has given it no LID; open the engine once it has one";
  }
  if (port.is_active && attributes.active_mtu < kMtuMin) {
    port.gid_index = -1;
    port.trouble = "its MTU is too small for the handshake: set its interface's to 1500 or more";
  }
  if (!partition) {
    port.gid_index = -1;
    port.trouble = "it is in no such partition: " + hex(options.partition);
  }
  return detail;
}

}  // namespace

std::vector<Device> open_devices(const std::string& only) {
  std::vector<Device> devices;
  int count = 0;
  ibv_device** list = library().get_device_list(&count);
  if (list == nullptr) return devices;  // no RDMA in this kernel
  for (int i = 0; i < count; ++i) {
    const std::string name = library().get_device_name(list[i]);
    if (!only.empty() && name != only) continue;
    Device& device = devices.emplace_back();
    device.name = name;
    // Amazon's EFA and iWARP cards are listed, too, but have no reliable connections that a queue pair alone can make.
    if (list[i]->transport_type != IBV_TRANSPORT_IB) {
      device.trouble = "it has no InfiniBand or RoCE transport (Amazon's EFA: use transport 'ofi')";
      continue;
    }
    device.context.reset(library().open_device(list[i]));
    if (device.context == nullptr) {
      const int error = errno;
      device.trouble = std::string("cannot open it: ") + std::strerror(error);
      if (error == EACCES || error == EPERM) device.trouble += " (is /dev/infiniband/uverbs* open to this user?)";
      if (error == EMFILE) device.trouble += " (raise the limit on open files: ulimit -n)";
    }
  }
  library().free_device_list(list);
  return devices;
}

std::vector<PortDetail> inspect_ports(const Device& device, const RdmaOptions& options, const std::string& only) {
  std::vector<PortDetail> found;
  ibv_device_attr attributes{};
  if (device.context == nullptr || library().query_device(device.context.get(), &attributes) != 0) {
    PortDetail& detail = found.emplace_back();
    detail.port.name = detail.port.device = device.name;
    detail.port.trouble = device.trouble.empty() ? "cannot query the device" : device.trouble;
    return found;
  }
  for (uint32_t number = 1; number <= attributes.phys_port_cnt; ++number)
    found.push_back(inspect(device, static_cast<uint8_t>(number), options, only));
  return found;
}

uint32_t speed_mbps_now(const Port& port) { return rate_mbps(port.device, port.number); }

std::optional<int> gid_index_now(ibv_context* context, const PortDetail& detail) {
  ibv_port_attr attributes;
  if (query_port(context, detail.port.number, &attributes) != 0 || attributes.state != IBV_PORT_ACTIVE)
    return std::nullopt;
  // Peers know its old LID and partition: a subnet manager that assigned it another one has cut it off.
  const Endpoint& known = detail.endpoint;
  if (known.fabric == Fabric::kInfiniBand) {
    __be16 partition = 0;
    const int error = library().query_pkey(context, detail.port.number, detail.partition_index, &partition);
    if (attributes.lid != known.lid || (error == 0 && ntohs(partition) != known.partition)) return std::nullopt;
  }
  std::optional<int> found;
  for (const Candidate& candidate : gids_of(context, detail.port.number)) {
    if (candidate.gid != known.gid || candidate.fabric != known.fabric || candidate.index > kGidIndexMax) continue;
    const auto index = static_cast<int>(candidate.index);
    if (!found || index == detail.port.gid_index) found = index;
  }
  return found;
}

}  // namespace crossrail::verbs
