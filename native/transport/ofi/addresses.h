// The IP addresses of this host, for providers whose devices they are.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace crossrail::ofi {

struct HostAddress {
  std::string text;  // "10.0.0.1"
  std::string netdev;
  uint8_t prefix_bits = 0;
  uint32_t speed_mbps = 0;
  bool is_v6 = false;
  bool is_loopback = false;
  bool is_virtual = false;  // of a bridge or container: no device behind it
};

// Of interfaces that are up, without link-local ones.
std::vector<HostAddress> host_addresses();
// Empty text: not an IP address. Of one that the host lacks, all but 127/8 stay without netdev.
HostAddress parse_address(const std::string& text, const std::vector<HostAddress>& present);

}  // namespace crossrail::ofi
