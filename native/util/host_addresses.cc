#include "util/host_addresses.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <span>

#include "util/errors.h"

namespace crossrail {

namespace {

std::span<const uint8_t> ip_bytes(const sockaddr* address) {
  if (address->sa_family == AF_INET6) {
    return {reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr.s6_addr, 16};
  }
  return {reinterpret_cast<const uint8_t*>(&reinterpret_cast<const sockaddr_in*>(address)->sin_addr), 4};
}

uint8_t prefix_of(const sockaddr* mask, bool is_v6) {
  if (mask == nullptr) return is_v6 ? 128 : 32;
  int bits = 0;
  for (const uint8_t byte : ip_bytes(mask)) bits += __builtin_popcount(byte);
  return static_cast<uint8_t>(bits);
}

uint32_t speed_of(const std::string& netdev) {
  std::ifstream file("/sys/class/net/" + netdev + "/speed");
  int64_t mbps = 0;
  file >> mbps;  // -1, or an error on read, where the driver does not know
  return mbps > 0 && mbps < 100'000'000 ? static_cast<uint32_t>(mbps) : 0;
}

HostAddress describe(const ifaddrs& entry) {
  HostAddress address;
  const std::span<const uint8_t> bytes = ip_bytes(entry.ifa_addr);
  address.is_v6 = entry.ifa_addr->sa_family == AF_INET6;
  char text[INET6_ADDRSTRLEN] = "";
  inet_ntop(entry.ifa_addr->sa_family, bytes.data(), text, sizeof text);
  address.text = text;
  std::ranges::copy(bytes, address.ip.begin());
  address.netdev = entry.ifa_name;
  address.prefix_bits = prefix_of(entry.ifa_netmask, address.is_v6);
  address.is_loopback = (entry.ifa_flags & IFF_LOOPBACK) != 0;
  address.is_virtual =
      !address.is_loopback && !std::ifstream("/sys/class/net/" + address.netdev + "/device/uevent").good();
  address.is_bridge = std::ifstream("/sys/class/net/" + address.netdev + "/bridge/bridge_id").good();
  address.speed_mbps = address.is_loopback ? 0 : speed_of(address.netdev);
  return address;
}

bool is_link_local(const sockaddr* address) {
  const std::span<const uint8_t> bytes = ip_bytes(address);
  return bytes.size() == 16 && bytes[0] == 0xfe && (bytes[1] & 0xc0) == 0x80;
}

std::string list_text(const std::vector<HostAddress>& addresses) {
  std::string text;
  for (const HostAddress& address : addresses) text += (text.empty() ? "" : ", ") + address.netdev + " " + address.text;
  return text.empty() ? "none" : text;
}

}  // namespace

std::vector<HostAddress> host_addresses() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) throw_errno("getifaddrs", "cannot list the addresses of this host");
  std::vector<HostAddress> found;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0) continue;
    const int family = entry->ifa_addr->sa_family;
    if ((family != AF_INET && family != AF_INET6) || is_link_local(entry->ifa_addr)) continue;
    found.push_back(describe(*entry));
  }
  freeifaddrs(list);
  return found;
}

HostAddress parse_address(const std::string& text, const std::vector<HostAddress>& present) {
  HostAddress address;
  if (inet_pton(AF_INET, text.c_str(), address.ip.data()) == 1) {
    address.is_loopback = address.ip[0] == 127;
    address.prefix_bits = address.is_loopback ? 8 : 32;
  } else if (inet_pton(AF_INET6, text.c_str(), address.ip.data()) == 1) {
    address.is_v6 = true;
    address.prefix_bits = 128;
  } else {
    return {};
  }
  char normal[INET6_ADDRSTRLEN] = "";
  inet_ntop(address.is_v6 ? AF_INET6 : AF_INET, address.ip.data(), normal, sizeof normal);
  address.text = normal;
  const auto known = std::find_if(present.begin(), present.end(),
                                  [&](const HostAddress& other) { return other.text == address.text; });
  return known != present.end() ? *known : address;
}

HostAddress find_address(const std::string& name, const std::vector<HostAddress>& present) {
  HostAddress address = parse_address(name, present);
  if (!address.text.empty()) {
    if (!address.netdev.empty() || address.is_loopback) return address;
    throw UsageError("rails: " + name + " is no address of this host; it has: " + list_text(present));
  }
  for (const bool wants_v6 : {false, true}) {
    for (const HostAddress& other : present) {
      if (other.netdev == name && other.is_v6 == wants_v6) return other;
    }
  }
  throw UsageError("rails: '" + name +
                   "' is neither an IP address nor a netdev of this host that is up and has an address; it has: " +
                   list_text(present));
}

std::vector<HostAddress> usual_addresses(std::vector<HostAddress> present) {
  std::erase_if(present, [](const HostAddress& address) { return address.is_loopback; });
  std::stable_sort(present.begin(), present.end(), [](const HostAddress& a, const HostAddress& b) {
    if (a.is_virtual != b.is_virtual) return b.is_virtual;
    return a.speed_mbps > b.speed_mbps;
  });
  // docker0 has the same address on every host, so that peers would take their own for ours: with hardware of one's
  // own, bridges are taken by name only.
  if (!present.empty() && !present.front().is_virtual) {
    std::erase_if(present, [](const HostAddress& address) { return address.is_bridge; });
  }
  const bool any_v4 =
      std::any_of(present.begin(), present.end(), [](const HostAddress& address) { return !address.is_v6; });
  std::set<std::string> netdevs;
  std::erase_if(present, [&](const HostAddress& address) {
    return address.is_v6 == any_v4 || !netdevs.insert(address.netdev).second;
  });
  return present;
}

}  // namespace crossrail
