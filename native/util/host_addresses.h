// The IP addresses of this host, and which of them people usually mean.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace crossrail {

struct HostAddress {
  std::string text;              // "10.0.0.1"; empty: none
  std::array<uint8_t, 16> ip{};  // the first 4 bytes, or all with is_v6
  std::string netdev;            // empty: unknown
  uint8_t prefix_bits = 0;
  uint32_t speed_mbps = 0;  // 0 unknown
  bool is_v6 = false;
  bool is_loopback = false;
  bool is_virtual = false;  // of a container, a tunnel, or a bridge within the host: there is no device at the bottom
  bool is_bridge = false;
  bool is_poor = false;             // Wi-Fi or USB, such as the link to a server's management controller
  bool is_last = false;             // last resort: assigned by the host itself (169.254/16), or temporary
  bool has_carrier = true;          // false: the interface is up, but its cable is not connected
  std::vector<std::string> lowers;  // the interfaces below this one, if it is a bond, VLAN or bridge
};

// Of interfaces that are up; without link-local ones, which are useless without the interface's number, and that
// differs between hosts. Throws TransportError.
std::vector<HostAddress> host_addresses();

// The address in `present` that is spelled like this. If the host does not have it, netdev is empty; is_loopback for
// 127/8, all of which exists without being configured. Without text: not an IP address.
HostAddress parse_address(const std::string& text, const std::vector<HostAddress>& present);

// By address, or the first one of an interface: IPv4 before IPv6, is_last after both. Throws UsageError that begins
// with "rails: ".
HostAddress find_address(const std::string& name, const std::vector<HostAddress>& present);

// What to use by default: real devices first, including bonds, VLANs and bridges on top of one without an address of
// its own; fast ones first; one address per interface; all of the first one's family, since rails of different families
// cannot talk to each other. Interfaces without carrier are left out if any has one. Empty on a host without a network.
std::vector<HostAddress> usual_addresses(std::vector<HostAddress> present);

}  // namespace crossrail
