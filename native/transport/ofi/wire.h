// What NICs of this kind tell each other: endpoint bytes (in addresses) and offers (of paths). From outside, so checked.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "transport/ofi/domain.h"

namespace crossrail::ofi {

struct EndpointWords {
  uint32_t format = 0;      // fi_info::addr_format
  uint8_t prefix_bits = 0;  // of the IP network it is in, 0 unknown
  Name name;

  std::vector<uint8_t> encode() const;
  static std::optional<EndpointWords> decode(std::span<const uint8_t> bytes);
};

struct OfferWords {
  uint32_t path_id = 0;  // what its packets and immediates have to name
  uint64_t landing = 0;  // address and key of memory that nobody looks at, for immediates of no region
  uint64_t landing_key = 0;
  Name name;  // of the endpoint that takes this path's works

  std::vector<uint8_t> encode() const;
  static std::optional<OfferWords> decode(std::span<const uint8_t> bytes);
};

// Whether a provider can be given `name` as one more of the kind of `ours`: providers trust lengths and families.
bool is_name_like(uint32_t format, const Name& name, const Name& ours);

// 0 not reachable from each other, 1 perhaps, 2 in one IP network.
int nearness_of(const EndpointWords& a, const EndpointWords& b);

}  // namespace crossrail::ofi
