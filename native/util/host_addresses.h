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
  bool is_virtual = false;  // of a bridge or container: no device behind it
  bool is_bridge = false;
};

// Of interfaces that are up, without link-local ones: those are no use without the interface's number, which differs
// between hosts. Throws TransportError.
std::vector<HostAddress> host_addresses();

// That of `present` which is so written. One that the host lacks stays without netdev; is_loopback of 127/8, all of
// which is there without being configured. Without text: this is no IP address.
HostAddress parse_address(const std::string& text, const std::vector<HostAddress>& present);

// By address, or the first (IPv4 before IPv6) of an interface. Throws UsageError that begins with "rails: ".
HostAddress find_address(const std::string& name, const std::vector<HostAddress>& present);

// What to use when nobody says: real devices first, fast ones first, one address of each interface; of one family,
// since rails of different ones cannot talk to each other. Empty on a host without a network.
std::vector<HostAddress> usual_addresses(std::vector<HostAddress> present);

}  // namespace crossrail
