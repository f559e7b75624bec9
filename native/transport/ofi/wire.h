// What NICs of this kind tell each other: endpoint bytes (in addresses), offers (of paths), and what they say when they
// dial each other (Rules::connects). Untrusted, so checked.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "transport/ofi/domain.h"

namespace crossrail::ofi {

struct EndpointWords {
  uint32_t format = 0;      // fi_info::addr_format
  uint8_t way = 0;          // Rules::way: providers with different ones do not understand each other
  uint8_t prefix_bits = 0;  // of the IP network it is in, 0 unknown
  Name name;

  std::vector<uint8_t> encode() const;
  static std::optional<EndpointWords> decode(std::span<const uint8_t> bytes);
};

struct OfferWords {
  uint32_t path_id = 0;  // that its packets and immediates must name
  uint64_t landing = 0;  // address and key of scratch memory, for immediates without a region
  uint64_t landing_key = 0;
  uint64_t token = 0;  // that whoever dials this path must know; 0 if nobody dials
  Name name;           // of the endpoint that takes this path's works, or of where to dial

  std::vector<uint8_t> encode() const;
  static std::optional<OfferWords> decode(std::span<const uint8_t> bytes);
};

// Part of a connection request.
struct DialWords {
  uint32_t path_id = 0;  // of the dialed side, from its offer; 0: a line for datagrams
  uint64_t token = 0;    // from the same offer

  std::vector<uint8_t> encode() const;
  static std::optional<DialWords> decode(std::span<const uint8_t> bytes);
};

// Whether `name` may be passed to a provider as another name of the same kind as `ours`: providers trust lengths and
// families.
bool is_name_like(uint32_t format, const Name& name, const Name& ours);

// 0: cannot reach each other; 1: perhaps; 2: in one IP network.
int nearness_of(const EndpointWords& a, const EndpointWords& b);

}  // namespace crossrail::ofi
