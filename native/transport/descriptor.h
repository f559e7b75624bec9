// Addresses and region descriptors: what engines exchange over any channel of the user's, as versioned, bounds-checked,
// checksummed bytes. Decoding throws UsageError for anything malformed and never reads past the end.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "transport/types.h"

namespace crossrail {

using Bytes = std::vector<uint8_t>;

// 128 random bits drawn when an engine opens: an engine restarted under the same name is another incarnation.
using Incarnation = std::array<uint8_t, 16>;
std::string to_hex(std::span<const uint8_t> bytes);

// Where one tcp rail listens.
struct Endpoint {
  uint8_t family = 4;            // 4 or 6
  std::array<uint8_t, 16> ip{};  // network order; IPv4 in the first four bytes, the rest zero
  uint16_t port = 0;             // never 0 in an address that was given to peers
  uint8_t prefix_bits = 0;       // of the network that the address belongs to: 0..32 or 0..128
  uint32_t speed_mbps = 0;       // of the interface, 0 unknown

  bool operator==(const Endpoint&) const = default;
};
// "10.0.0.1:4711", "[::1]:80"
std::string to_text(const Endpoint& endpoint);
std::string ip_text(const Endpoint& endpoint);  // "10.0.0.1", "::1"

// How to reach one rail of an RDMA transport: bytes in that transport's own format, opaque to everybody else.
struct RdmaEndpoint {
  Bytes bytes;              // 1..kRdmaEndpointBytesMax
  uint32_t speed_mbps = 0;  // 0 unknown

  bool operator==(const RdmaEndpoint&) const = default;
};
inline constexpr size_t kRdmaEndpointBytesMax = 64;

// The rails of one RDMA transport.
struct RdmaRails {
  // The kind of network; engines on different networks cannot reach each other. ofi: the provider ("efa", "tcp");
  // verbs: its own choice; sim: the world. 0..kFabricBytesMax bytes of UTF-8.
  std::string fabric;
  std::vector<RdmaEndpoint> endpoints;

  bool operator==(const RdmaRails&) const = default;
};
inline constexpr size_t kFabricBytesMax = 32;

// What the NICs of one RDMA transport need from a peer that accesses a region.
struct RdmaKeys {
  uint64_t base = 0;           // address of the region's first byte, as the NIC counts addresses
  std::vector<uint64_t> keys;  // one for each of the owner's rails of that transport

  bool operator==(const RdmaKeys&) const = default;
};

// Index of a kind's entry in `Address::rdma` and `RegionDescriptor::rdma`.
inline constexpr size_t kRdmaKinds = 3;
constexpr bool is_rdma(TransportKind kind) { return (transport_bit(kind) & kRdmaTransports) != 0; }
// For RDMA transports only.
constexpr size_t rdma_index(TransportKind kind) {
  return kind == TransportKind::kVerbs ? 0 : kind == TransportKind::kOfi ? 1 : 2;
}

// Identity of one engine, and how to reach it.
struct Address {
  uint32_t transports = 0;  // mask of transport_bit()s, at least one
  Incarnation incarnation{};
  std::string name;                 // 1..64 bytes of UTF-8, chosen by the user, need not be unique
  std::string host;                 // the kernel's boot id, so that two engines can tell whether they share a host
  uint64_t net = 0;                 // inode of the network namespace, 0 unknown
  uint32_t pid = 0;                 // in the engine's own pid namespace; only for messages
  uint8_t rail_count = 1;           // shm and null: 1..kRailsMax
  std::vector<Endpoint> endpoints;  // tcp's rails: 1..kRailsMax with tcp, else none
  // The rails of verbs, ofi and sim: at least one per transport in use, else none. At most kRailsMax in all, so that an
  // address fits wherever one is sent at the start of a connection.
  std::array<RdmaRails, kRdmaKinds> rdma;

  bool has(TransportKind kind) const { return (transports & transport_bit(kind)) != 0; }
  uint32_t rail_count_on(TransportKind kind) const;
  uint32_t speed_mbps_of(TransportKind kind, uint32_t rail) const;           // 0 unknown, or no such rail
  RdmaRails& rdma_on(TransportKind kind) { return rdma[rdma_index(kind)]; }  // for RDMA transports only
  const RdmaRails& rdma_on(TransportKind kind) const { return rdma[rdma_index(kind)]; }

  Bytes encode() const;
  static Address decode(std::span<const uint8_t> bytes);
  bool operator==(const Address&) const = default;
};

// Whether shm can connect the two: they must share a kernel and a network namespace, since the names of abstract unix
// sockets are per namespace.
bool same_host(const Address& a, const Address& b);

// A region of one engine as its peers see it.
struct RegionDescriptor {
  Address owner;
  uint64_t region_id = 0;  // slot and generation: an id is never used twice in one incarnation
  uint64_t length_bytes = 0;
  Access access = Access::kRemoteWrite;
  MemoryKind memory = MemoryKind::kHost;
  std::array<RdmaKeys, kRdmaKinds> rdma;  // as many keys as the owner has rails there

  RdmaKeys& rdma_on(TransportKind kind) { return rdma[rdma_index(kind)]; }  // for RDMA transports only
  const RdmaKeys& rdma_on(TransportKind kind) const { return rdma[rdma_index(kind)]; }

  Bytes encode() const;
  static RegionDescriptor decode(std::span<const uint8_t> bytes);
  bool operator==(const RegionDescriptor&) const = default;
};

}  // namespace crossrail
