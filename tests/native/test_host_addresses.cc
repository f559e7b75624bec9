// Which addresses of a host are taken when a number of rails is asked for.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "util/errors.h"
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

TEST_CASE("rails by number: a bond, VLAN or bridge over hardware without an address is as good as hardware") {
  HostAddress bond = address("bond0", 200'000);
  bond.lowers = {"eth0", "eth1"};
  HostAddress bridge = address("br0", 10'000);
  bridge.is_bridge = true;
  bridge.lowers = {"eth2"};

  CHECK(netdevs_of(usual_addresses({address("mgmt0", 1000), virtual_address("docker0", true), bridge, bond})) ==
        Netdevs{"bond0", "br0", "mgmt0"});
}

TEST_CASE("rails by number: above an interface with an address of its own is the same wire") {
  HostAddress vlan = address("eth0.7", 100'000);
  vlan.lowers = {"eth0"};

  CHECK(netdevs_of(usual_addresses({vlan, address("eth0", 100'000), address("eth1", 1000)})) ==
        Netdevs{"eth0", "eth1", "eth0.7"});
}

TEST_CASE("rails by number: the link to a management controller is no rail") {
  HostAddress controller = address("usb0", 1000);
  controller.is_poor = true;
  HostAddress by_itself = address("usb1", 400'000);
  by_itself.is_last = true;
  HostAddress v6 = address("eth0");
  v6.is_v6 = true;

  CHECK(netdevs_of(usual_addresses({controller, by_itself, address("eth0")})) == Netdevs{"eth0", "usb0"});
  CHECK(netdevs_of(usual_addresses({by_itself, v6})) == Netdevs{"eth0"});
  CHECK(netdevs_of(usual_addresses({by_itself})) == Netdevs{"usb1"});
}

TEST_CASE("rails by number: interfaces without a carrier are left out where others have one") {
  HostAddress unplugged = address("eth0");
  unplugged.has_carrier = false;

  CHECK(netdevs_of(usual_addresses({unplugged, virtual_address("veth0")})) == Netdevs{"veth0"});
  CHECK(netdevs_of(usual_addresses({unplugged})) == Netdevs{"eth0"});
}

TEST_CASE("a rail by name has an address that stays, if there is one") {
  HostAddress temporary = address("eth0");
  temporary.is_v6 = temporary.is_last = true;
  HostAddress lasting = address("eth0");
  lasting.is_v6 = true;
  lasting.text = "lasting";

  CHECK(find_address("eth0", {temporary, lasting}).text == "lasting");
  CHECK(find_address("eth0", {temporary}).text == "of eth0");
}

TEST_CASE("an address that is local to a link is no rail, and is not said to be nobody's") {
  for (const char* name : {"fe80::1", "fe80::1%eth0", "febf::1"}) {
    CAPTURE(name);
    CHECK_THROWS_WITH_AS(find_address(name, {}), doctest::Contains("link-local"), UsageError);
  }
  CHECK_THROWS_WITH_AS(find_address("fec0::1", {}), doctest::Contains("is not an address of this host"), UsageError);
}

}  // namespace crossrail
