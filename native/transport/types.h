// Words that the engine and every transport share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace crossrail {

// Immediates: 28 bits of the user's number and, on the wire, a 4-bit share code above them.
inline constexpr uint32_t kImmBits = 28;
inline constexpr uint32_t kImmMax = (1u << kImmBits) - 1;
inline constexpr uint32_t kNoImm = ~0u;

// Counters hold 1/48ths: the smallest number that all fractions of the share codes divide.
inline constexpr uint32_t kUnitsPerCount = 48;

inline constexpr uint32_t kRailsMax = 16;
inline constexpr uint32_t kAnyRail = ~0u;

enum class TransportKind : uint8_t { kShm = 1, kNull = 2, kTcp = 3, kVerbs = 4, kOfi = 5, kSim = 6 };
inline constexpr uint32_t kTransportsMax = 4;  // open in one engine at the same time
inline constexpr uint32_t kTransportKinds = 6;
const char* transport_name(TransportKind kind);

// Sets of kinds are masks of these.
constexpr uint32_t transport_bit(TransportKind kind) { return 1u << static_cast<uint32_t>(kind); }
// The kinds whose rails are RDMA NICs, including simulated ones.
inline constexpr uint32_t kRdmaTransports =
    transport_bit(TransportKind::kVerbs) | transport_bit(TransportKind::kOfi) | transport_bit(TransportKind::kSim);
inline constexpr uint32_t kAllTransports = transport_bit(TransportKind::kShm) | transport_bit(TransportKind::kNull) |
                                           transport_bit(TransportKind::kTcp) | kRdmaTransports;
// "shm and tcp"; "none" for the empty set.
std::string transport_names(uint32_t transports);

// Region ids: generation << 16 | slot, generation > 0. Drawn by the engine (engine/region_ids.h), the same in all of
// its transports, never twice in one incarnation. Slots are for tables; two open regions never share one.
inline constexpr uint32_t kRegionSlotBits = 16;
inline constexpr uint32_t kRegionSlots = 1u << kRegionSlotBits;
constexpr uint32_t region_slot(uint64_t region_id) { return static_cast<uint32_t>(region_id & (kRegionSlots - 1)); }

// What a remote engine may do to a region.
enum class Access : uint8_t {
  kLocal = 0,       // source of our own writes only
  kRemoteRead = 1,  // and peers may read it
  kRemoteWrite = 3  // and peers may read and write it
};

// Write includes read.
constexpr bool allows(Access granted, Access needed) {
  return (static_cast<uint8_t>(granted) & static_cast<uint8_t>(needed)) == static_cast<uint8_t>(needed);
}
// Whether [offset, offset + length) is within `bound` bytes. Safe for untrusted numbers: nothing overflows.
constexpr bool fits(uint64_t offset, uint64_t length, uint64_t bound) {
  return length <= bound && offset <= bound - length;
}

// Where memory is. kCuda: GPU memory, at an address that only the GPU's driver and NICs can use. The values are part of
// the wire format.
enum class MemoryKind : uint8_t { kHost = 0, kCuda = 1 };

// How bytes reach memory that the peer cannot map. kAuto: the one that measures faster.
enum class PrivatePath : uint8_t { kAuto, kStaged, kCrossMemoryAttach };

// How users spell it.
inline const char* access_name(Access access) {
  switch (access) {
    case Access::kLocal:
      return "local";
    case Access::kRemoteRead:
      return "read";
    case Access::kRemoteWrite:
      return "write";
  }
  return "invalid";
}

// Where phantom regions begin (Engine::register_phantom): an address that no memory has.
inline std::byte* const kPhantomBase =
    reinterpret_cast<std::byte*>(uint64_t{1} << 60);  // NOLINT(performance-no-int-to-ptr)

// How an operation ended. The values are part of the wire format: changing one changes the version of every protocol.
enum class Status : uint8_t {
  kPending = 0,
  kDone,
  kCancelled,        // at the user's request; no part of it moves any more
  kPeerLost,         // the peer died, left, or is of an older incarnation
  kRegionClosed,     // the remote region was closed, or never existed
  kRegionRevoked,    // the remote region refuses this generation of peers; kRegionClosed if the target no longer knows
  kOutOfBounds,      // refused by the target: past the region's end
  kAccessDenied,     // refused by the target: region not open to this operation
  kMessageTooLong,   // no receive buffer of the target can hold it
  kEngineClosed,     // our own engine was closed first
  kTransportFailed,  // anything else; the detail says what
  kChecksumMismatch  // a checked write: the target's memory is not what was sent
};
const char* status_name(Status status);

}  // namespace crossrail
