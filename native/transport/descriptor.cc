#include "transport/descriptor.h"

#include <arpa/inet.h>

#include <algorithm>
#include <string_view>

#include "util/codec.h"
#include "util/errors.h"

namespace crossrail {

namespace {

constexpr uint32_t kAddressMagic = 0x41415258;     // "XRAA"
constexpr uint32_t kDescriptorMagic = 0x44525258;  // "XRRD"
constexpr uint16_t kVersion = 4;
constexpr size_t kNameBytesMax = 64;
constexpr uint64_t kRegionBytesMax = uint64_t{1} << 56;
constexpr TransportKind kRdma[kRdmaKinds] = {TransportKind::kVerbs, TransportKind::kOfi, TransportKind::kSim};
constexpr size_t kEncodedBytesMax = 2048;
constexpr size_t kFrameBytes = 4 + 2 + 4;                                           // magic, version, checksum
constexpr size_t kIdentityBytesMax = 4 + 16 + 2 * (1 + kNameBytesMax) + 8 + 4 + 1;  // see put_address
constexpr size_t kEndpointsBytesMax = 1 + kRailsMax * (1 + 16 + 2 + 1 + 4);         // family, ip, port, prefix, speed
constexpr size_t kRdmaBytesMax = kRdmaKinds * (1 + kFabricBytesMax + 1) +           // fabrics and counts
                                 kRailsMax * (1 + kRdmaEndpointBytesMax + 4);       // endpoints with their speeds
constexpr size_t kRegionBytes = kRdmaKinds * 8 + kRailsMax * 8 + (8 + 8 + 1);       // bases, keys; id, length, access
static_assert(kFrameBytes + kIdentityBytesMax + kEndpointsBytesMax + kRdmaBytesMax + kRegionBytes <= kEncodedBytesMax);
// The start of a connection carries an address in a packet of at most 2 KiB (tcp's Hello, shm's greeting).
static_assert(kFrameBytes + kIdentityBytesMax + kEndpointsBytesMax + kRdmaBytesMax <= 2048 - 256);

// FNV-1a: detects truncation and flipped bits; it is no defence against attackers, and none is needed: the fields are
// checked one by one.
uint32_t checksum(std::span<const uint8_t> bytes) {
  uint32_t hash = 2166136261u;
  for (const uint8_t byte : bytes) hash = (hash ^ byte) * 16777619u;
  return hash;
}

Bytes seal(Writer& writer) {
  writer.put(checksum(writer.bytes()));
  return std::move(writer.bytes());
}

// Well-formed UTF-8: no overlong forms, surrogates or values past U+10FFFF (RFC 3629).
bool is_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<uint8_t>(text[i]);
    const size_t length = lead < 0x80 ? 1 : lead >> 5 == 6 ? 2 : lead >> 4 == 14 ? 3 : lead >> 3 == 30 ? 4 : 0;
    if (length == 0 || text.size() - i < length) return false;
    uint32_t point = length == 1 ? lead : lead & (0x7fu >> length);
    for (size_t k = 1; k < length; ++k) {
      const auto next = static_cast<uint8_t>(text[i + k]);
      if (next >> 6 != 2) return false;
      point = point << 6 | (next & 0x3fu);
    }
    constexpr uint32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
    if (point < kSmallest[length] || point > 0x10ffff || (point >= 0xd800 && point < 0xe000)) return false;
    i += length;
  }
  return true;
}

[[noreturn]] void malformed(const char* what, const std::string& why) {
  throw UsageError(std::string(what) + " bytes are malformed: " + why);
}

// Checks size, checksum, magic and version; returns a reader positioned after them.
Reader open_sealed(const char* what, uint32_t magic, std::span<const uint8_t> bytes) {
  if (bytes.size() < 10) malformed(what, std::to_string(bytes.size()) + " bytes, at least 10 expected");
  if (bytes.size() > kEncodedBytesMax) {
    malformed(what, std::to_string(bytes.size()) + " bytes, at most " + std::to_string(kEncodedBytesMax) + " expected");
  }
  Reader reader(bytes.first(bytes.size() - 4));
  if (reader.get<uint32_t>() != magic) malformed(what, "they do not begin as a crossrail " + std::string(what));
  const auto version = reader.get<uint16_t>();
  if (version != kVersion) {
    malformed(what, "version " + std::to_string(version) + ", this build speaks version " + std::to_string(kVersion) +
                        "; use the same crossrail release on both sides");
  }
  Reader tail(bytes.last(4));
  if (tail.get<uint32_t>() != checksum(bytes.first(bytes.size() - 4)))
    malformed(what, "checksum differs, they were cut or changed");
  return reader;
}

constexpr size_t ip_bytes(uint8_t family) { return family == 4 ? 4 : 16; }

void put_endpoint(Writer& writer, const Endpoint& endpoint) {
  writer.put(endpoint.family);
  writer.put_bytes(std::span(endpoint.ip).first(ip_bytes(endpoint.family)));
  writer.put(endpoint.port);
  writer.put(endpoint.prefix_bits);
  writer.put(endpoint.speed_mbps);
}

Endpoint get_endpoint(const char* what, Reader& reader) {
  Endpoint endpoint;
  endpoint.family = reader.get<uint8_t>();
  if (reader.ok() && endpoint.family != 4 && endpoint.family != 6) {
    malformed(what, "address family " + std::to_string(endpoint.family) + " of an endpoint is neither 4 nor 6");
  }
  reader.get_bytes(std::span(endpoint.ip).first(ip_bytes(endpoint.family)));
  endpoint.port = reader.get<uint16_t>();
  endpoint.prefix_bits = reader.get<uint8_t>();
  endpoint.speed_mbps = reader.get<uint32_t>();
  if (!reader.ok()) malformed(what, "they end too early");
  if (endpoint.port == 0) malformed(what, "an endpoint has port 0");
  if (endpoint.prefix_bits > 8 * ip_bytes(endpoint.family)) {
    malformed(what, "prefix of " + std::to_string(endpoint.prefix_bits) + " bits of an endpoint is too long");
  }
  if (std::ranges::all_of(endpoint.ip, [](uint8_t byte) { return byte == 0; })) {
    malformed(what, "an endpoint has the unspecified address");
  }
  return endpoint;
}

void put_rdma(Writer& writer, const RdmaRails& rails) {
  writer.put_text(rails.fabric);
  writer.put(static_cast<uint8_t>(rails.endpoints.size()));
  for (const RdmaEndpoint& endpoint : rails.endpoints) {
    writer.put(static_cast<uint8_t>(endpoint.bytes.size()));
    writer.put_bytes(endpoint.bytes);
    writer.put(endpoint.speed_mbps);
  }
}

RdmaRails get_rdma(const char* what, const std::string& kind, Reader& reader) {
  RdmaRails rails;
  rails.fabric = reader.get_text();
  const uint32_t count = reader.get<uint8_t>();
  if (!reader.ok()) malformed(what, "they end too early");
  if (rails.fabric.size() > kFabricBytesMax || !is_utf8(rails.fabric)) {
    malformed(what, "the name of the network of " + kind + " is too long or not UTF-8");
  }
  if (count < 1 || count > kRailsMax) {
    malformed(what, std::to_string(count) + " rails of " + kind + ", 1..16 expected");
  }
  for (uint32_t i = 0; i < count; ++i) {
    RdmaEndpoint endpoint;
    const size_t length = reader.get<uint8_t>();
    if (reader.ok() && (length < 1 || length > kRdmaEndpointBytesMax)) {
      malformed(what, "an endpoint of " + kind + " of " + std::to_string(length) + " bytes, 1..64 expected");
    }
    endpoint.bytes.resize(length);
    reader.get_bytes(endpoint.bytes);
    endpoint.speed_mbps = reader.get<uint32_t>();
    if (!reader.ok()) malformed(what, "they end too early");
    rails.endpoints.push_back(std::move(endpoint));
  }
  return rails;
}

// Checks that span several fields.
void check_rdma(const char* what, const Address& address) {
  size_t rails = 0;
  for (const RdmaRails& half : address.rdma) rails += half.endpoints.size();
  if (rails > kRailsMax) {
    malformed(what, std::to_string(rails) + " rails of verbs, ofi and sim together, at most 16 expected");
  }
}

void put_address(Writer& writer, const Address& address) {
  writer.put(address.transports);
  writer.put_bytes(address.incarnation);
  writer.put_text(address.name);
  writer.put_text(address.host);
  writer.put(address.net);
  writer.put(address.pid);
  writer.put(address.rail_count);
  writer.put(static_cast<uint8_t>(address.endpoints.size()));
  for (const Endpoint& endpoint : address.endpoints) put_endpoint(writer, endpoint);
  for (const TransportKind kind : kRdma) {
    if (address.has(kind)) put_rdma(writer, address.rdma_on(kind));
  }
}

Address get_address(const char* what, Reader& reader) {
  Address address;
  address.transports = reader.get<uint32_t>();
  reader.get_bytes(address.incarnation);
  address.name = reader.get_text();
  address.host = reader.get_text();
  address.net = reader.get<uint64_t>();
  address.pid = reader.get<uint32_t>();
  address.rail_count = reader.get<uint8_t>();
  const uint32_t endpoints = reader.get<uint8_t>();
  if (!reader.ok()) malformed(what, "they end too early");
  if (const uint32_t unknown = address.transports & ~kAllTransports; unknown != 0) {
    malformed(what, "the set of transports " + std::to_string(address.transports) +
                        " names some that are unknown to this build; use the same crossrail release on both sides");
  }
  if (address.transports == 0) malformed(what, "they name no transport");
  if (address.name.empty() || address.name.size() > kNameBytesMax) malformed(what, "engine name is empty or too long");
  if (!is_utf8(address.name) || !is_utf8(address.host)) malformed(what, "a name in them is not UTF-8");
  if (address.host.size() > kNameBytesMax) malformed(what, "host identity is too long");
  if (address.rail_count < 1 || address.rail_count > kRailsMax) {
    malformed(what, "rail count " + std::to_string(address.rail_count) + " is not in 1..16");
  }
  if (endpoints > kRailsMax) malformed(what, std::to_string(endpoints) + " endpoints, at most 16 expected");
  if ((endpoints != 0) != address.has(TransportKind::kTcp)) {
    malformed(what, std::to_string(endpoints) + " endpoints do not agree with its transports, " +
                        transport_names(address.transports) + ": tcp has at least one, others none");
  }
  for (uint32_t i = 0; i < endpoints; ++i) address.endpoints.push_back(get_endpoint(what, reader));
  for (const TransportKind kind : kRdma) {
    if (address.has(kind)) address.rdma_on(kind) = get_rdma(what, transport_name(kind), reader);
  }
  check_rdma(what, address);
  return address;
}

void put_keys(Writer& writer, const RdmaKeys& keys) {
  writer.put(keys.base);
  for (const uint64_t key : keys.keys) writer.put(key);
}

// The number of keys is that of the owner's rails: it is not encoded again.
RdmaKeys get_keys(Reader& reader, size_t count) {
  RdmaKeys keys;
  keys.base = reader.get<uint64_t>();
  for (size_t i = 0; i < count; ++i) keys.keys.push_back(reader.get<uint64_t>());
  return keys;
}

}  // namespace

std::string to_hex(std::span<const uint8_t> bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  text.reserve(2 * bytes.size());
  for (const uint8_t byte : bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

std::string ip_text(const Endpoint& endpoint) {
  char text[INET6_ADDRSTRLEN] = "?";
  inet_ntop(endpoint.family == 4 ? AF_INET : AF_INET6, endpoint.ip.data(), text, sizeof text);
  return text;
}

std::string to_text(const Endpoint& endpoint) {
  const std::string port = ":" + std::to_string(endpoint.port);
  return endpoint.family == 4 ? ip_text(endpoint) + port : "[" + ip_text(endpoint) + "]" + port;
}

uint32_t Address::rail_count_on(TransportKind kind) const {
  switch (kind) {
    case TransportKind::kShm:
    case TransportKind::kNull:
      return rail_count;
    case TransportKind::kTcp:
      return static_cast<uint32_t>(endpoints.size());
    case TransportKind::kVerbs:
    case TransportKind::kOfi:
    case TransportKind::kSim:
      return static_cast<uint32_t>(rdma_on(kind).endpoints.size());
  }
  return 0;
}

uint32_t Address::speed_mbps_of(TransportKind kind, uint32_t rail) const {
  if (rail >= rail_count_on(kind)) return 0;
  if (kind == TransportKind::kTcp) return endpoints[rail].speed_mbps;
  return is_rdma(kind) ? rdma_on(kind).endpoints[rail].speed_mbps : 0;
}

bool same_host(const Address& a, const Address& b) { return a.host == b.host && a.net == b.net; }

Bytes Address::encode() const {
  Writer writer;
  writer.put(kAddressMagic);
  writer.put(kVersion);
  put_address(writer, *this);
  return seal(writer);
}

Address Address::decode(std::span<const uint8_t> bytes) {
  Reader reader = open_sealed("address", kAddressMagic, bytes);
  Address address = get_address("address", reader);
  if (!reader.finished()) malformed("address", "there is more after the end");
  return address;
}

Bytes RegionDescriptor::encode() const {
  Writer writer;
  writer.put(kDescriptorMagic);
  writer.put(kVersion);
  put_address(writer, owner);
  for (const TransportKind kind : kRdma) {
    if (owner.has(kind)) put_keys(writer, rdma_on(kind));
  }
  writer.put(region_id);
  writer.put(length_bytes);
  writer.put(static_cast<uint8_t>(access));
  writer.put(static_cast<uint8_t>(memory));
  return seal(writer);
}

RegionDescriptor RegionDescriptor::decode(std::span<const uint8_t> bytes) {
  constexpr const char* kWhat = "region descriptor";
  Reader reader = open_sealed(kWhat, kDescriptorMagic, bytes);
  RegionDescriptor descriptor;
  descriptor.owner = get_address(kWhat, reader);
  for (const TransportKind kind : kRdma) {
    if (descriptor.owner.has(kind)) {
      descriptor.rdma_on(kind) = get_keys(reader, descriptor.owner.rdma_on(kind).endpoints.size());
    }
  }
  descriptor.region_id = reader.get<uint64_t>();
  descriptor.length_bytes = reader.get<uint64_t>();
  const auto access = reader.get<uint8_t>();
  const auto memory = reader.get<uint8_t>();
  if (!reader.finished()) malformed(kWhat, reader.ok() ? "there is more after the end" : "they end too early");
  switch (access) {
    case static_cast<uint8_t>(Access::kLocal):
    case static_cast<uint8_t>(Access::kRemoteRead):
    case static_cast<uint8_t>(Access::kRemoteWrite):
      descriptor.access = static_cast<Access>(access);
      break;
    default:  // a byte from outside, not an enum
      malformed(kWhat, "access " + std::to_string(access) + " is unknown");
  }
  if (memory > static_cast<uint8_t>(MemoryKind::kCuda)) {
    malformed(kWhat, "kind of memory " + std::to_string(memory) + " is unknown");
  }
  descriptor.memory = static_cast<MemoryKind>(memory);
  if (descriptor.region_id == 0) malformed(kWhat, "region id is zero");
  if (descriptor.length_bytes == 0 || descriptor.length_bytes > kRegionBytesMax) {
    malformed(kWhat, "length " + std::to_string(descriptor.length_bytes) + " is out of range");
  }
  for (const RdmaKeys& keys : descriptor.rdma) {
    if (keys.base > UINT64_MAX - descriptor.length_bytes) {
      malformed(kWhat, "base " + std::to_string(keys.base) + " and length pass the end of the address space");
    }
  }
  return descriptor;
}

const char* transport_name(TransportKind kind) {
  switch (kind) {
    case TransportKind::kShm:
      return "shm";
    case TransportKind::kNull:
      return "null";
    case TransportKind::kTcp:
      return "tcp";
    case TransportKind::kVerbs:
      return "verbs";
    case TransportKind::kOfi:
      return "ofi";
    case TransportKind::kSim:
      return "sim";
  }
  return "?";
}

std::string transport_names(uint32_t transports) {
  std::string names;
  for (uint32_t kind = 1; kind <= kTransportKinds; ++kind) {
    if ((transports >> kind & 1) == 0) continue;
    names += (names.empty() ? "" : " and ") + std::string(transport_name(static_cast<TransportKind>(kind)));
  }
  return names.empty() ? "none" : names;
}

const char* status_name(Status status) {
  switch (status) {
    case Status::kPending:
      return "pending";
    case Status::kDone:
      return "done";
    case Status::kCancelled:
      return "cancelled";
    case Status::kPeerLost:
      return "peer-lost";
    case Status::kRegionClosed:
      return "region-closed";
    case Status::kRegionRevoked:
      return "region-revoked";
    case Status::kOutOfBounds:
      return "out-of-bounds";
    case Status::kAccessDenied:
      return "access-denied";
    case Status::kMessageTooLong:
      return "message-too-long";
    case Status::kEngineClosed:
      return "engine-closed";
    case Status::kTransportFailed:
      return "transport-failed";
    case Status::kChecksumMismatch:
      return "checksum-mismatch";
  }
  return "?";
}

}  // namespace crossrail
