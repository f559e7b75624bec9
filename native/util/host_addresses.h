// The IP addresses of this host, and which of them people mean.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace crossrail {

struct HostAddress {
  std::string text;              // "10.0.0.1"; empty: none
  std::array<uint8_t, 16> ip{};  // the first 4 bytes, or all with is_v6
  std::string netdev;            // empty: not known
  uint8_t prefix_bits = 0;
  uint32_t speed_mbps = 0;  // 0 unknown
  bool is_v6 = false;
  bool is_loopback = false;
  bool is_virtual = false;  // of a container, a tunnel or a bridge within the host: no device behind it, or below it
  bool is_bridge = false;
  bool is_poor = false;     // Wi-Fi or USB, such as the link to a server's management controller
  bool is_last = false;     // where there is nothing else: given to the host by itself (169.254/16), or temporary
  bool has_carrier = true;  // false: the interface is up, and its cable leads nowhere
  std::vector<std::string> lowers;  // the interfaces that it stands on: of a bond, VLAN or bridge
};

// Of interfaces that are up, without link-local ones: those are no use without the interface's number, which differs
// between hosts. Throws TransportError.
std::vector<HostAddress> host_addresses();

// That of `present` which is so written. One that the host lacks stays without netdev; is_loopback of 127/8, all of
// which is there without being configured. Without text: this is no IP address.
HostAddress parse_address(const std::string& text, const std::vector<HostAddress>& present);

// By address, or the first of an interface: IPv4 before IPv6, and what is_last behind both. Throws UsageError that
// begins with "rails: ".
HostAddress find_address(const std::string& name, const std::vector<HostAddress>& present);

// What to use when nobody says: real devices first, and bonds, VLANs and bridges that stand on one without an address
// of its own; fast ones first, one address of each interface; all of the first one's family, since rails of different
// ones cannot talk to each other. Without interfaces that have no carrier, if any has. Empty on a host without a
// network.
std::vector<HostAddress> usual_addresses(std::vector<HostAddress> present);

}  // namespace crossrail
