// What peers tell each other about ports and paths. Both travel as bytes in addresses and handshakes of the layer
// above: they are untrusted and checked.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace crossrail::verbs {

enum class Fabric : uint8_t { kInfiniBand = 1, kRoceV2 = 2, kRoceV1 = 3 };
const char* fabric_name(Fabric fabric);

using Gid = std::array<uint8_t, 16>;

inline constexpr uint16_t kDefaultPartition = 0xffff;
inline constexpr uint16_t kFullMember = 0x8000;  // of a partition: limited members do not hear each other

// A port and its datagram queue pair.
struct Endpoint {
  Fabric fabric = Fabric::kInfiniBand;
  uint8_t mtu = 0;                         // an ibv_mtu: 1 is 256 bytes, 5 is 4096
  uint8_t prefix_bits = 0;                 // RoCE: prefix length of the address's network, 0 unknown
  uint16_t lid = 0;                        // InfiniBand
  uint16_t partition = kDefaultPartition;  // its P_Key: the highest bit marks a full member
  bool wants_global_route = false;         // packets must name it by its GID, even within its network
  Gid gid{};
  uint32_t queue_pair = 0;
  uint32_t queue_key = 0;

  bool operator==(const Endpoint&) const = default;
};

std::vector<uint8_t> encode(const Endpoint& endpoint);
// Nothing: malformed.
std::optional<Endpoint> decode_endpoint(std::span<const uint8_t> bytes);

// One end of a path: a queue pair for messages, one for writes and reads.
struct Offer {
  uint8_t reads_max = 0;  // reads that the peer may have in flight at once
  uint32_t message_queue_pair = 0;
  uint32_t message_psn = 0;  // of the first packet that this side sends
  uint32_t work_queue_pair = 0;
  uint32_t work_psn = 0;
};

std::vector<uint8_t> encode(const Offer& offer);
std::optional<Offer> decode_offer(std::span<const uint8_t> bytes);

// InfiniBand: the LID by which routers know a subnet's port from outside, if its GID carries one (NVIDIA's FLID, bytes
// 4 and 5); else 0. The subnet itself is then in bytes 6 and 7.
uint16_t router_lid(const Gid& gid);
// InfiniBand: no router is between them.
bool share_subnet(const Gid& a, const Gid& b);

// 0: not at all; 1: perhaps, through routers; 2: in one network. See rdma::Nic::nearness().
int nearness(const Endpoint& ours, const Endpoint& theirs);

bool is_mapped_ipv4(const Gid& gid);
bool is_link_local(const Gid& gid);
// "10.0.0.1" or "fe80::1".
std::string address_text(const Gid& gid);

}  // namespace crossrail::verbs
