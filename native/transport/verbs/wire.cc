#include "transport/verbs/wire.h"

#include <arpa/inet.h>

#include <algorithm>

#include "util/codec.h"
#include "util/prefix.h"

namespace crossrail::verbs {

namespace {

constexpr uint8_t kVersion = 2;  // of endpoints
constexpr uint8_t kOfferVersion = 1;
constexpr uint32_t kNumberMax = 0xffffff;  // of queue pairs and packets: 24 bits
constexpr uint8_t kMtuMax = 5;
constexpr uint32_t kMappedBits = 96;  // in front of an IPv4 address

}  // namespace

const char* fabric_name(Fabric fabric) {
  switch (fabric) {
    case Fabric::kInfiniBand:
      return "InfiniBand";
    case Fabric::kRoceV2:
      return "RoCE v2";
    case Fabric::kRoceV1:
      return "RoCE v1";
  }
  return "?";
}

std::vector<uint8_t> encode(const Endpoint& endpoint) {
  Writer out;
  out.put(kVersion);
  out.put(static_cast<uint8_t>(endpoint.fabric));
  out.put(endpoint.mtu);
  out.put(endpoint.prefix_bits);
  out.put(endpoint.lid);
  out.put(endpoint.partition);
  out.put(static_cast<uint8_t>(endpoint.wants_global_route));
  out.put_bytes(endpoint.gid);
  out.put(endpoint.queue_pair);
  out.put(endpoint.queue_key);
  return std::move(out.bytes());
}

std::optional<Endpoint> decode_endpoint(std::span<const uint8_t> bytes) {
  Reader in(bytes);
  Endpoint endpoint;
  const auto version = in.get<uint8_t>();
  const auto fabric = in.get<uint8_t>();
  endpoint.fabric = static_cast<Fabric>(fabric);
  endpoint.mtu = in.get<uint8_t>();
  endpoint.prefix_bits = in.get<uint8_t>();
  endpoint.lid = in.get<uint16_t>();
  endpoint.partition = in.get<uint16_t>();
  const auto wants_global_route = in.get<uint8_t>();
  endpoint.wants_global_route = wants_global_route != 0;
  in.get_bytes(endpoint.gid);
  endpoint.queue_pair = in.get<uint32_t>();
  endpoint.queue_key = in.get<uint32_t>();
  const bool good = in.finished() && version == kVersion && fabric >= 1 && fabric <= 3 && endpoint.mtu >= 1 &&
                    endpoint.mtu <= kMtuMax && endpoint.prefix_bits <= 128 && wants_global_route <= 1 &&
                    endpoint.queue_pair <= kNumberMax;
  return good ? std::optional(endpoint) : std::nullopt;
}

std::vector<uint8_t> encode(const Offer& offer) {
  Writer out;
  out.put(kOfferVersion);
  out.put(offer.reads_max);
  out.put(offer.message_queue_pair);
  out.put(offer.message_psn);
  out.put(offer.work_queue_pair);
  out.put(offer.work_psn);
  return std::move(out.bytes());
}

std::optional<Offer> decode_offer(std::span<const uint8_t> bytes) {
  Reader in(bytes);
  Offer offer;
  const auto version = in.get<uint8_t>();
  offer.reads_max = in.get<uint8_t>();
  offer.message_queue_pair = in.get<uint32_t>();
  offer.message_psn = in.get<uint32_t>();
  offer.work_queue_pair = in.get<uint32_t>();
  offer.work_psn = in.get<uint32_t>();
  const bool good = in.finished() && version == kOfferVersion && offer.message_queue_pair <= kNumberMax &&
                    offer.message_psn <= kNumberMax && offer.work_queue_pair <= kNumberMax &&
                    offer.work_psn <= kNumberMax;
  return good ? std::optional(offer) : std::nullopt;
}

bool is_mapped_ipv4(const Gid& gid) {
  static constexpr std::array<uint8_t, 12> kPrefix = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::equal(kPrefix.begin(), kPrefix.end(), gid.begin());
}

bool is_link_local(const Gid& gid) { return gid[0] == 0xfe && (gid[1] & 0xc0) == 0x80; }

uint16_t router_lid(const Gid& gid) { return static_cast<uint16_t>(gid[4] << 8 | gid[5]); }

bool share_subnet(const Gid& a, const Gid& b) {
  const bool both_routable = router_lid(a) != 0 && router_lid(b) != 0;
  if (!both_routable) return share_bits(a, b, 64);  // the upper half of a GID is the subnet
  return share_bits(a, b, 32) && a[6] == b[6] && a[7] == b[7];
}

namespace {

// Only packets of the same partition get through, and from limited members only to full ones.
bool share_partition(uint16_t a, uint16_t b) { return ((a ^ b) & ~kFullMember) == 0 && ((a | b) & kFullMember) != 0; }

int nearness_of_infiniband(const Endpoint& ours, const Endpoint& theirs) {
  if (!share_partition(ours.partition, theirs.partition)) return 0;
  if (share_subnet(ours.gid, theirs.gid)) return 2;
  return router_lid(theirs.gid) != 0 ? 1 : 0;  // the LID of the router in between is known to the subnet manager only
}

}  // namespace

int nearness(const Endpoint& ours, const Endpoint& theirs) {
  if (ours.fabric != theirs.fabric) return 0;
  if (ours.fabric == Fabric::kInfiniBand) return nearness_of_infiniband(ours, theirs);
  // RoCE v1 is not routed.
  if (ours.fabric == Fabric::kRoceV1) return 2;
  if (is_mapped_ipv4(ours.gid) != is_mapped_ipv4(theirs.gid)) return 0;
  if (is_link_local(ours.gid) != is_link_local(theirs.gid)) return 0;
  if (is_link_local(ours.gid)) return 2;
  const uint32_t bits = std::min(ours.prefix_bits, theirs.prefix_bits);
  if (bits == 0) return 1;
  const uint32_t compared = is_mapped_ipv4(ours.gid) ? kMappedBits + std::min<uint32_t>(bits, 32) : bits;
  return share_bits(ours.gid, theirs.gid, compared) ? 2 : 1;
}

std::string address_text(const Gid& gid) {
  char text[INET6_ADDRSTRLEN] = "";
  if (is_mapped_ipv4(gid)) {
    ::inet_ntop(AF_INET, gid.data() + 12, text, sizeof text);
  } else {
    ::inet_ntop(AF_INET6, gid.data(), text, sizeof text);
  }
  return text;
}

}  // namespace crossrail::verbs
