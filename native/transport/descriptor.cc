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
constexpr uint16_t kVersion = 2;
constexpr size_t kNameBytesMax = 64;
constexpr size_t kEncodedBytesMax = 1024;
// magic, version, checksum; transports, incarnation, two texts, net, pid, rails; endpoints; id, length, access
static_assert(10 + (4 + 16 + 2 * (1 + kNameBytesMax) + 8 + 4 + 1) + (1 + kRailsMax * 24) + 17 <= kEncodedBytesMax);

// FNV-1a: catches truncation and flipped bits; it is no defence against an attacker, and none is needed: the fields are
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

// Checks size, checksum, magic and version; leaves the reader behind them.
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
  return address;
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
  writer.put(region_id);
  writer.put(length_bytes);
  writer.put(static_cast<uint8_t>(access));
  return seal(writer);
}

RegionDescriptor RegionDescriptor::decode(std::span<const uint8_t> bytes) {
  constexpr const char* kWhat = "region descriptor";
  Reader reader = open_sealed(kWhat, kDescriptorMagic, bytes);
  RegionDescriptor descriptor;
  descriptor.owner = get_address(kWhat, reader);
  descriptor.region_id = reader.get<uint64_t>();
  descriptor.length_bytes = reader.get<uint64_t>();
  const auto access = reader.get<uint8_t>();
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
  if (descriptor.region_id == 0) malformed(kWhat, "region id is zero");
  if (descriptor.length_bytes == 0 || descriptor.length_bytes > (uint64_t{1} << 56)) {
    malformed(kWhat, "length " + std::to_string(descriptor.length_bytes) + " is out of range");
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
  }
  return "?";
}

}  // namespace crossrail
