#include "util/host_addresses.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string_view>
#include <tuple>
#include <utility>

#include "util/directory.h"
#include "util/errors.h"

namespace crossrail {

namespace {

constexpr size_t kLowersMax = 256;

std::string directory_of(const std::string& netdev) { return "/sys/class/net/" + netdev; }

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
  std::ifstream file(directory_of(netdev) + "/speed");
  int64_t mbps = 0;
  file >> mbps;  // -1, or a read error, if the driver does not know
  return mbps > 0 && mbps < 100'000'000 ? static_cast<uint32_t>(mbps) : 0;
}

// The interfaces directly below, which /sys links as "lower_eth0".
std::vector<std::string> lowers_of(const std::string& netdev) {
  static constexpr std::string_view kLower = "lower_";
  std::vector<std::string> lowers;
  for (const std::string& name : names_in(directory_of(netdev))) {
    if (name.starts_with(kLower)) lowers.push_back(name.substr(kLower.size()));
  }
  return lowers;
}

// Those and everything below them. Such a chain is short; one that never ends can only come from a fake /sys.
std::vector<std::string> all_lowers_of(const std::string& netdev) {
  std::vector<std::string> found = lowers_of(netdev);
  for (size_t i = 0; i < found.size() && found.size() < kLowersMax; ++i) {
    for (const std::string& lower : lowers_of(found[i])) {
      if (std::ranges::find(found, lower) == found.end()) found.push_back(lower);
    }
  }
  return found;
}

bool has_device(const std::string& netdev) { return std::ifstream(directory_of(netdev) + "/device/uevent").good(); }

bool is_wireless_or_usb(const std::string& netdev) {
  std::error_code none;
  const std::string device = std::filesystem::canonical(directory_of(netdev) + "/device", none);
  return device.find("/usb") != std::string::npos || std::filesystem::exists(directory_of(netdev) + "/phy80211", none);
}

// Flags of IPv6 addresses, the low bits of linux/if_addr.h's IFA_F_...: temporary (privacy extensions), deprecated,
// tentative, or in use by another host, too. getifaddrs does not report them.
std::map<std::string, uint32_t> read_v6_flags() {
  std::map<std::string, uint32_t> flags;
  std::ifstream file("/proc/net/if_inet6");
  std::string ip;
  std::string index;
  std::string prefix;
  std::string scope;
  std::string bits;
  std::string netdev;
  while (file >> ip >> index >> prefix >> scope >> bits >> netdev) {
    flags[ip] = static_cast<uint32_t>(std::strtoul(bits.c_str(), nullptr, 16));
  }
  return flags;
}

std::string hexadecimal(std::span<const uint8_t> bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : bytes) text += {kDigits[byte >> 4], kDigits[byte & 15]};
  return text;
}

// Addresses that a host has assigned itself (169.254/16) are mostly those of the link to its management controller.
// IPv6 addresses may be temporary.
bool is_last_choice(const HostAddress& address, const std::map<std::string, uint32_t>& v6_flags) {
  constexpr uint32_t kTemporary = 0x01, kDuplicate = 0x08, kDeprecated = 0x20, kTentative = 0x40;
  if (!address.is_v6) return address.ip[0] == 169 && address.ip[1] == 254;
  const auto flags = v6_flags.find(hexadecimal(address.ip));
  return flags != v6_flags.end() && (flags->second & (kTemporary | kDuplicate | kDeprecated | kTentative)) != 0;
}

HostAddress describe(const ifaddrs& entry, const std::map<std::string, uint32_t>& v6_flags) {
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
  address.has_carrier = (entry.ifa_flags & IFF_RUNNING) != 0;
  address.lowers = all_lowers_of(address.netdev);
  address.is_virtual =
      !address.is_loopback && !has_device(address.netdev) && std::ranges::none_of(address.lowers, has_device);
  address.is_bridge = std::ifstream(directory_of(address.netdev) + "/bridge/bridge_id").good();
  address.is_poor = is_wireless_or_usb(address.netdev);
  address.is_last = is_last_choice(address, v6_flags);
  address.speed_mbps = address.is_loopback ? 0 : speed_of(address.netdev);
  return address;
}

// Of IPv6.
bool is_link_local(std::span<const uint8_t> ip) { return ip.size() == 16 && ip[0] == 0xfe && (ip[1] & 0xc0) == 0x80; }

std::string list_text(const std::vector<HostAddress>& addresses) {
  std::string text;
  for (const HostAddress& address : addresses) text += (text.empty() ? "" : ", ") + address.netdev + " " + address.text;
  return text.empty() ? "none" : text;
}

}  // namespace

std::vector<HostAddress> host_addresses() {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) throw_errno("getifaddrs", "cannot list the addresses of this host");
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> list(first, &freeifaddrs);
  const std::map<std::string, uint32_t> v6_flags = read_v6_flags();
  std::vector<HostAddress> found;
  for (const ifaddrs* entry = list.get(); entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0) continue;
    const int family = entry->ifa_addr->sa_family;
    if ((family != AF_INET && family != AF_INET6) || is_link_local(ip_bytes(entry->ifa_addr))) continue;
    found.push_back(describe(*entry, v6_flags));
  }
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
  const HostAddress without_scope = parse_address(name.substr(0, name.find('%')), present);
  if (without_scope.is_v6 && is_link_local(without_scope.ip)) {
    throw UsageError(
        "rails: " + name +
        " is an IPv6 link-local address: it means nothing without an interface, and cannot be a rail. This "
        "host has: " +
        list_text(present));
  }
  HostAddress address = parse_address(name, present);
  if (!address.text.empty()) {
    if (!address.netdev.empty() || address.is_loopback) return address;
    throw UsageError("rails: " + name + " is not an address of this host; it has: " + list_text(present));
  }
  for (const auto& [wants_last, wants_v6] : {std::pair(false, false), {false, true}, {true, false}, {true, true}}) {
    for (const HostAddress& other : present) {
      if (other.netdev == name && other.is_last == wants_last && other.is_v6 == wants_v6) return other;
    }
  }
  throw UsageError("rails: '" + name +
                   "' is neither an IP address nor a netdev of this host that is up and has an address; it has: " +
                   list_text(present));
}

std::vector<HostAddress> usual_addresses(std::vector<HostAddress> present) {
  std::erase_if(present, [](const HostAddress& address) { return address.is_loopback; });
  if (std::ranges::any_of(present, &HostAddress::has_carrier)) {
    std::erase_if(present, [](const HostAddress& address) { return !address.has_carrier; });
  }
  std::set<std::string> addressed;
  for (const HostAddress& address : present) {
    if (!address.is_last) addressed.insert(address.netdev);
  }
  // An interface on top of one that has an address itself leads to the same wire.
  for (HostAddress& address : present) {
    address.is_virtual = address.is_virtual || std::ranges::any_of(address.lowers, [&](const std::string& lower) {
                           return addressed.contains(lower);
                         });
  }
  const auto rank = [](const HostAddress& address) {
    return std::tuple(address.is_last, address.is_virtual, address.is_poor, -int64_t{address.speed_mbps},
                      address.is_v6);
  };
  std::ranges::stable_sort(present, {}, rank);
  // docker0 has the same address on every host, so peers would take their own for ours: on a host with real hardware,
  // bridges without a device are used only if named.
  if (!present.empty() && !present.front().is_virtual) {
    std::erase_if(present, [](const HostAddress& address) { return address.is_bridge && address.is_virtual; });
  }
  std::set<std::string> netdevs;
  const bool is_v6 = !present.empty() && present.front().is_v6;
  std::erase_if(present, [&](const HostAddress& address) {
    return address.is_v6 != is_v6 || !netdevs.insert(address.netdev).second;
  });
  if (!present.empty() && !present.front().is_last) {
    std::erase_if(present, [](const HostAddress& address) { return address.is_last; });
  }
  return present;
}

}  // namespace crossrail
