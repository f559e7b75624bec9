// Which addresses of this host are rails, and which of them talks to which of a peer.
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <set>

#include "transport/tcp/connect.h"
#include "util/errors.h"

namespace crossrail::tcp {

namespace {

constexpr int kBacklog = 512;

struct HostAddress {
  Endpoint endpoint;
  std::string netdev;
  bool loopback = false;
  bool is_virtual = false;  // of a bridge or container: no device behind it
};

uint32_t speed_of(const std::string& netdev) {
  std::ifstream file("/sys/class/net/" + netdev + "/speed");
  int64_t mbps = 0;
  file >> mbps;  // -1, or an error on read, where the driver does not know
  return mbps > 0 && mbps < 100'000'000 ? static_cast<uint32_t>(mbps) : 0;
}

bool has_device(const std::string& netdev) {
  return std::ifstream("/sys/class/net/" + netdev + "/device/uevent").good();
}

uint8_t prefix_of(const sockaddr* mask, int family) {
  if (mask == nullptr) return family == 6 ? 128 : 32;
  const auto* bytes = family == 6
                          ? reinterpret_cast<const uint8_t*>(&reinterpret_cast<const sockaddr_in6*>(mask)->sin6_addr)
                          : reinterpret_cast<const uint8_t*>(&reinterpret_cast<const sockaddr_in*>(mask)->sin_addr);
  uint8_t bits = 0;
  for (int i = 0; i < (family == 6 ? 16 : 4); ++i) bits = static_cast<uint8_t>(bits + __builtin_popcount(bytes[i]));
  return bits;
}

std::vector<HostAddress> host_addresses() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) throw_errno("getifaddrs", "cannot list the addresses of this host");
  std::vector<HostAddress> found;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0) continue;
    const int family = entry->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    sockaddr_storage storage{};
    std::memcpy(&storage, entry->ifa_addr, family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in));
    HostAddress address;
    address.endpoint = from_sockaddr(storage);
    // Link-local ones are no use without the netdev's number, which differs between hosts.
    if (address.endpoint.family == 6 && address.endpoint.ip[0] == 0xfe && (address.endpoint.ip[1] & 0xc0) == 0x80)
      continue;
    address.endpoint.prefix_bits = prefix_of(entry->ifa_netmask, address.endpoint.family);
    address.netdev = entry->ifa_name;
    address.loopback = (entry->ifa_flags & IFF_LOOPBACK) != 0;
    address.is_virtual = !address.loopback && !has_device(address.netdev);
    address.endpoint.speed_mbps = address.loopback ? 0 : speed_of(address.netdev);
    found.push_back(address);
  }
  freeifaddrs(list);
  return found;
}

std::string list_text(const std::vector<HostAddress>& addresses) {
  std::string text;
  for (const HostAddress& address : addresses) {
    text += (text.empty() ? "" : ", ") + address.netdev + " " + ip_text(address.endpoint);
  }
  return text.empty() ? "none" : text;
}

bool parse_ip(const std::string& text, Endpoint* endpoint) {
  in_addr v4;
  in6_addr v6;
  if (inet_pton(AF_INET, text.c_str(), &v4) == 1) {
    endpoint->family = 4;
    endpoint->prefix_bits = 32;
    std::memcpy(endpoint->ip.data(), &v4, 4);
    return true;
  }
  if (inet_pton(AF_INET6, text.c_str(), &v6) == 1) {
    endpoint->family = 6;
    endpoint->prefix_bits = 128;
    std::memcpy(endpoint->ip.data(), &v6, 16);
    return true;
  }
  return false;
}

bool is_loopback(const Endpoint& endpoint) { return endpoint.family == 4 && endpoint.ip[0] == 127; }

bool same_subnet(const Endpoint& a, const Endpoint& b) {
  if (a.family != b.family) return false;
  const uint8_t bits = std::min(a.prefix_bits, b.prefix_bits);
  for (uint32_t bit = 0; bit < bits; bit += 8) {
    const uint32_t left = std::min<uint32_t>(8, bits - bit);
    const auto mask = static_cast<uint8_t>(0xff00u >> left);
    if ((a.ip[bit / 8] & mask) != (b.ip[bit / 8] & mask)) return false;
  }
  return true;
}

std::vector<HostAddress> choose(const std::vector<std::string>& names, uint32_t count) {
  const std::vector<HostAddress> present = host_addresses();
  std::vector<HostAddress> chosen;
  for (const std::string& name : names) {
    HostAddress address;
    if (parse_ip(name, &address.endpoint)) {
      const auto known = std::find_if(present.begin(), present.end(), [&](const HostAddress& other) {
        return other.endpoint.family == address.endpoint.family && other.endpoint.ip == address.endpoint.ip;
      });
      if (known != present.end()) {
        address = *known;
        address.netdev.clear();                    // asked for by address: the kernel routes
      } else if (is_loopback(address.endpoint)) {  // all of 127/8 is there without being configured
        address.endpoint.prefix_bits = 8;
      } else {
        throw UsageError("rails: " + name + " is no address of this host; it has: " + list_text(present));
      }
      chosen.push_back(address);
      continue;
    }
    const size_t before = chosen.size();
    for (const bool v4 : {true, false}) {  // one rail per netdev: its IPv4 address where it has one
      for (const HostAddress& other : present) {
        if (chosen.size() == before && other.netdev == name && (other.endpoint.family == 4) == v4)
          chosen.push_back(other);
      }
    }
    if (chosen.size() == before) {
      throw UsageError("rails: '" + name +
                       "' is neither an IP address nor a netdev of this host that is up and has an address; it has: " +
                       list_text(present));
    }
  }
  if (!names.empty()) return chosen;
  std::vector<HostAddress> candidates;
  for (const HostAddress& address : present) {
    if (!address.loopback) candidates.push_back(address);
  }
  // Real devices first, fast ones first, IPv4 first.
  std::stable_sort(candidates.begin(), candidates.end(), [](const HostAddress& a, const HostAddress& b) {
    if (a.is_virtual != b.is_virtual) return b.is_virtual;
    if (a.endpoint.speed_mbps != b.endpoint.speed_mbps) return a.endpoint.speed_mbps > b.endpoint.speed_mbps;
    return a.endpoint.family < b.endpoint.family;
  });
  // One family, since rails of different ones cannot talk to each other; one address of each netdev.
  const bool has_v4 = std::any_of(candidates.begin(), candidates.end(),
                                  [](const HostAddress& address) { return address.endpoint.family == 4; });
  std::set<std::string> netdevs;
  std::erase_if(candidates, [&](const HostAddress& address) {
    return address.endpoint.family != (has_v4 ? 4 : 6) || !netdevs.insert(address.netdev).second;
  });
  for (uint32_t i = 0; i < count; ++i) {
    HostAddress address;
    if (candidates.empty()) {
      parse_ip("127.0.0." + std::to_string(i + 1), &address.endpoint);
      address.endpoint.prefix_bits = 8;
    } else {
      address = candidates[i % candidates.size()];
      address.netdev.clear();
    }
    chosen.push_back(address);
  }
  return chosen;
}

}  // namespace

std::vector<Rail> open_rails(const std::vector<std::string>& names, uint32_t count, uint16_t port) {
  std::vector<Rail> rails;
  std::map<std::array<uint8_t, 16>, uint16_t> used;  // rails per address, when they share one
  for (HostAddress& address : choose(names, count)) {
    Rail rail;
    rail.endpoint = address.endpoint;
    rail.netdev = address.netdev;
    rail.bound_to_netdev = !address.netdev.empty() && !address.loopback;
    const uint16_t offset = used[rail.endpoint.ip]++;
    rail.endpoint.port = port == 0 ? 0 : static_cast<uint16_t>(port + offset);
    rail.listener =
        Fd(socket(rail.endpoint.family == 6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!rail.listener) throw_errno("socket", "cannot make a socket", "raise the limit on open files (ulimit -n)");
    const int on = 1;
    setsockopt(rail.listener.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (rail.endpoint.family == 6) setsockopt(rail.listener.get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
    sockaddr_storage storage;
    const socklen_t size = to_sockaddr(rail.endpoint, &storage);
    if (bind(rail.listener.get(), reinterpret_cast<sockaddr*>(&storage), size) != 0) {
      const std::string what = "cannot listen on " + to_text(rail.endpoint);
      if (errno == EADDRINUSE) {
        throw_errno("bind", what, "another process has this port: choose another `port`, or 0 for any free one");
      }
      if (errno == EACCES) throw_errno("bind", what, "ports below 1024 are root's: choose a higher `port`");
      throw_errno("bind", what);
    }
    if (listen(rail.listener.get(), kBacklog) != 0) throw_errno("listen", "cannot listen on " + to_text(rail.endpoint));
    sockaddr_storage bound{};
    socklen_t bound_size = sizeof bound;
    getsockname(rail.listener.get(), reinterpret_cast<sockaddr*>(&bound), &bound_size);
    rail.endpoint.port = from_sockaddr(bound).port;
    rails.push_back(std::move(rail));
  }
  return rails;
}

std::vector<RailPair> pair_rails(const std::vector<Endpoint>& ours, const std::vector<Endpoint>& theirs) {
  std::vector<RailPair> pairs;
  const auto pair_up = [&](const std::vector<uint32_t>& a, const std::vector<uint32_t>& b) {
    if (a.empty() || b.empty()) return;
    for (size_t k = 0; k < std::max(a.size(), b.size()); ++k) pairs.push_back({a[k % a.size()], b[k % b.size()]});
  };
  // Subnets are told apart by the first rail, of either side, that lies in them.
  std::vector<bool> taken(ours.size(), false);
  std::vector<bool> taken_there(theirs.size(), false);
  for (uint32_t i = 0; i < ours.size(); ++i) {
    if (taken[i]) continue;
    std::vector<uint32_t> a;
    std::vector<uint32_t> b;
    for (uint32_t k = i; k < ours.size(); ++k) {
      if (!taken[k] && same_subnet(ours[i], ours[k])) a.push_back(k);
    }
    for (uint32_t k = 0; k < theirs.size(); ++k) {
      if (!taken_there[k] && same_subnet(ours[i], theirs[k])) b.push_back(k);
    }
    if (b.empty()) continue;
    for (const uint32_t k : a) taken[k] = true;
    for (const uint32_t k : b) taken_there[k] = true;
    pair_up(a, b);
  }
  if (!pairs.empty()) return pairs;
  for (const uint8_t family : {uint8_t{4}, uint8_t{6}}) {  // routed
    std::vector<uint32_t> a;
    std::vector<uint32_t> b;
    for (uint32_t k = 0; k < ours.size(); ++k) {
      if (ours[k].family == family) a.push_back(k);
    }
    for (uint32_t k = 0; k < theirs.size(); ++k) {
      if (theirs[k].family == family) b.push_back(k);
    }
    pair_up(a, b);
  }
  return pairs;
}

}  // namespace crossrail::tcp
