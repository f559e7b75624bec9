// What travels between engines by any channel of the user's: addresses and region descriptors, as versioned,
// bounds-checked, checksummed bytes. Decoding throws UsageError for anything malformed and never reads past the end.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/types.h"

namespace crossrail {

using Bytes = std::vector<uint8_t>;

// 128 random bits drawn when an engine opens: the same name restarted is another incarnation.
using Incarnation = std::array<uint8_t, 16>;
std::string to_hex(std::span<const uint8_t> bytes);

// Identity of one engine, and how to reach it.
struct Address {
  TransportKind transport = TransportKind::kShm;
  Incarnation incarnation{};
  std::string name;        // 1..64 bytes of UTF-8, chosen by the user, need not be unique
  std::string host;        // host identity: the kernel's boot id, so that "same host" can be told
  uint32_t pid = 0;        // as seen in the engine's own pid namespace; for messages only
  uint8_t rail_count = 1;  // 1..kRailsMax

  Bytes encode() const;
  static Address decode(std::span<const uint8_t> bytes);
  bool operator==(const Address&) const = default;
};

// A region of one engine as its peers see it.
struct RegionDescriptor {
  Address owner;
  uint64_t region_id = 0;  // slot and generation: an id is never used twice in one incarnation
  uint64_t length_bytes = 0;
  Access access = Access::kRemoteWrite;

  Bytes encode() const;
  static RegionDescriptor decode(std::span<const uint8_t> bytes);
  bool operator==(const RegionDescriptor&) const = default;
};

}  // namespace crossrail
