// Which addresses of this host are rails, and how they are paired with a peer's.
#include <netinet/in.h>

#include <algorithm>
#include <cerrno>
#include <map>

#include "transport/tcp/connect.h"
#include "util/errors.h"
#include "util/host_addresses.h"
#include "util/prefix.h"

namespace crossrail::tcp {

namespace {

constexpr int kBacklog = 512;

bool same_subnet(const Endpoint& a, const Endpoint& b) {
  return a.family == b.family && share_bits(a.ip, b.ip, std::min(a.prefix_bits, b.prefix_bits));
}

Endpoint endpoint_of(const HostAddress& address) {
  Endpoint endpoint;
  endpoint.family = address.is_v6 ? 6 : 4;
  endpoint.ip = address.ip;
  endpoint.prefix_bits = address.prefix_bits;
  endpoint.speed_mbps = address.speed_mbps;
  return endpoint;
}

struct Choice {
  HostAddress address;
  bool by_netdev = false;  // connections leave through that interface only; otherwise the kernel routes
};

std::vector<Choice> choose(const std::vector<std::string>& names, uint32_t count) {
  const std::vector<HostAddress> present = host_addresses();
  std::vector<Choice> chosen;
  for (const std::string& name : names) {
    chosen.push_back({.address = find_address(name, present)});
    chosen.back().by_netdev = chosen.back().address.netdev == name;
  }
  if (!names.empty()) return chosen;
  const std::vector<HostAddress> usual = usual_addresses(present);
  for (uint32_t i = 0; i < count; ++i) {
    chosen.push_back(
        {.address = usual.empty() ? parse_address("127.0.0." + std::to_string(i + 1), {}) : usual[i % usual.size()]});
  }
  return chosen;
}

// All of 127/8 exists without being configured, on one interface.
std::string device_of(const HostAddress& address) {
  if (!address.netdev.empty()) return address.netdev.substr(0, address.netdev.find(':'));  // "eth0:1" is a label
  return address.is_loopback ? "lo" : address.text;
}

}  // namespace

std::vector<Rail> open_rails(const std::vector<std::string>& names, uint32_t count, uint16_t port) {
  std::vector<Rail> rails;
  std::map<std::array<uint8_t, 16>, uint16_t> used;  // rails per address, if several share one
  for (const auto& [address, by_netdev] : choose(names, count)) {
    Rail rail;
    rail.endpoint = endpoint_of(address);
    rail.device = device_of(address);
    rail.netdev = by_netdev ? address.netdev : "";
    rail.bound_to_netdev = by_netdev && !address.is_loopback;
    const uint16_t offset = used[rail.endpoint.ip]++;
    if (port != 0 && port + offset > UINT16_MAX) {
      throw UsageError("port = " + std::to_string(port) +
                       " is too high: of the rails on one address each takes the next port, and rail " +
                       std::to_string(rails.size()) + " would have " + std::to_string(port + offset) + ", above 65535");
    }
    rail.endpoint.port = port == 0 ? 0 : static_cast<uint16_t>(port + offset);
    rail.listener =
        Fd(socket(rail.endpoint.family == 6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!rail.listener) throw_errno("socket", "cannot make a socket");
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
  // Each subnet is identified by the first rail, of either side, in it.
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
  // Apart from rails in a common subnet, others may be networks of their own. If they were paired, they would be tried
  // for ever; and a peer that ends would no longer be noticed at once, since that requires that nobody listens at any
  // of its addresses.
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

std::string leads_back_text(const Address& own, const Address& peer, uint32_t rail) {
  constexpr std::array<uint8_t, 16> kV6 = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
  const Endpoint& there = peer.endpoints[rail];
  const bool is_loopback = there.family == 6 ? there.ip == kV6 : there.ip[0] == 127;
  if (same_host(own, peer)) return "";
  if (is_loopback) {
    return "; that address is one within a host: the peer's had no other when its engine opened, or its rails= names "
           "it";
  }
  const auto is_same = [&](const Endpoint& ours) { return ours.family == there.family && ours.ip == there.ip; };
  if (std::ranges::none_of(own.endpoints, is_same)) return "";
  return "; this host has that address, too, so it leads to ourselves: name other rails on both sides";
}

}  // namespace crossrail::tcp
