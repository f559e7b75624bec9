// Which addresses of a host are taken when a number of rails is asked for.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "util/host_addresses.h"

namespace crossrail {

namespace {

HostAddress address(const std::string& netdev, uint32_t speed_mbps = 0) {
  HostAddress address;
  address.text = "of " + netdev;
  address.netdev = netdev;
  address.speed_mbps = speed_mbps;
  return address;
}

HostAddress virtual_address(const std::string& netdev, bool is_bridge = false) {
  HostAddress made = address(netdev, 10'000);
  made.is_virtual = true;
  made.is_bridge = is_bridge;
  return made;
}

std::vector<std::string> netdevs_of(const std::vector<HostAddress>& addresses) {
  std::vector<std::string> netdevs;
  for (const HostAddress& address : addresses) netdevs.push_back(address.netdev);
  return netdevs;
}

using Netdevs = std::vector<std::string>;

}  // namespace

TEST_CASE("rails by number: real devices first, fast ones first, and no bridge beside them") {
  const std::vector<HostAddress> present = {virtual_address("docker0", true), address("eth0", 1000),
                                            virtual_address("vxlan0"), address("eth1", 100'000)};

  CHECK(netdevs_of(usual_addresses(present)) == Netdevs{"eth1", "eth0", "vxlan0"});
}

TEST_CASE("rails by number: a host that has nothing but bridges has them") {
  CHECK(netdevs_of(usual_addresses({virtual_address("br0", true), virtual_address("veth0")})) ==
        Netdevs{"br0", "veth0"});
}

TEST_CASE("rails by number: of each interface one address, of one family, and no loopback") {
  HostAddress loopback = address("lo");
  loopback.is_loopback = true;
  HostAddress v6 = address("eth0");
  v6.is_v6 = true;

  CHECK(netdevs_of(usual_addresses({loopback, v6, address("eth0"), address("eth0")})) == Netdevs{"eth0"});
  CHECK(netdevs_of(usual_addresses({loopback, v6})) == Netdevs{"eth0"});
  CHECK(usual_addresses({loopback}).empty());
}

}  // namespace crossrail
