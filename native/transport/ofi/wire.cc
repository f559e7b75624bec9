#include "transport/ofi/wire.h"

#include <algorithm>

#include "transport/rdma/nic.h"
#include "util/codec.h"
#include "util/prefix.h"

namespace crossrail::ofi {

namespace {

constexpr uint8_t kVersion = 3;
constexpr size_t kWireNameBytesMax = 56;
static_assert(1 + 2 + 1 + 1 + 1 + kWireNameBytesMax <= rdma::kEndpointBytesMax);
static_assert(1 + 4 + 8 + 8 + 8 + 1 + kWireNameBytesMax <= rdma::kOfferBytesMax);

void put_name(Writer& writer, const Name& name) {
  writer.put(static_cast<uint8_t>(name.size()));
  writer.put_bytes(name);
}

// The rest of the reader, to the last byte.
bool get_name(Reader& reader, Name* name) {
  const size_t bytes = reader.get<uint8_t>();
  if (!reader.ok() || bytes == 0 || bytes > kWireNameBytesMax || reader.rest().size() != bytes) return false;
  name->assign(reader.rest().begin(), reader.rest().end());
  return true;
}

// The bytes of the IP address in a socket address; empty for other formats.
std::span<const uint8_t> ip_of(const EndpointWords& words) {
  if (words.format == FI_SOCKADDR_IN && words.name.size() >= 8) return {words.name.data() + 4, 4};
  if (words.format == FI_SOCKADDR_IN6 && words.name.size() >= 24) return {words.name.data() + 8, 16};
  return {};
}

}  // namespace

std::vector<uint8_t> EndpointWords::encode() const {
  Writer writer;
  writer.put(kVersion);
  writer.put(static_cast<uint16_t>(format));
  writer.put(way);
  writer.put(prefix_bits);
  put_name(writer, name);
  return std::move(writer.bytes());
}

std::optional<EndpointWords> EndpointWords::decode(std::span<const uint8_t> bytes) {
  Reader reader(bytes);
  EndpointWords words;
  const uint8_t version = reader.get<uint8_t>();
  words.format = reader.get<uint16_t>();
  words.way = reader.get<uint8_t>();
  words.prefix_bits = reader.get<uint8_t>();
  if (version != kVersion || words.prefix_bits > 128 || !get_name(reader, &words.name)) return std::nullopt;
  return words;
}

std::vector<uint8_t> OfferWords::encode() const {
  Writer writer;
  writer.put(kVersion);
  writer.put(path_id);
  writer.put(landing);
  writer.put(landing_key);
  writer.put(token);
  put_name(writer, name);
  return std::move(writer.bytes());
}

std::optional<OfferWords> OfferWords::decode(std::span<const uint8_t> bytes) {
  Reader reader(bytes);
  OfferWords words;
  const uint8_t version = reader.get<uint8_t>();
  words.path_id = reader.get<uint32_t>();
  words.landing = reader.get<uint64_t>();
  words.landing_key = reader.get<uint64_t>();
  words.token = reader.get<uint64_t>();
  if (version != kVersion || words.path_id == 0 || !get_name(reader, &words.name)) return std::nullopt;
  return words;
}

std::vector<uint8_t> DialWords::encode() const {
  Writer writer;
  writer.put(kVersion);
  writer.put(path_id);
  writer.put(token);
  return std::move(writer.bytes());
}

std::optional<DialWords> DialWords::decode(std::span<const uint8_t> bytes) {
  Reader reader(bytes);
  DialWords words;
  const uint8_t version = reader.get<uint8_t>();
  words.path_id = reader.get<uint32_t>();
  words.token = reader.get<uint64_t>();
  if (version != kVersion || !reader.finished()) return std::nullopt;
  return words;
}

bool is_name_like(uint32_t format, const Name& name, const Name& ours) {
  if (name.size() != ours.size()) return false;
  // The length of a socket address follows from its family.
  const bool has_family = format == FI_SOCKADDR || format == FI_SOCKADDR_IN || format == FI_SOCKADDR_IN6;
  return !has_family || (name.size() >= 2 && name[0] == ours[0] && name[1] == ours[1]);
}

int nearness_of(const EndpointWords& a, const EndpointWords& b) {
  if (a.format != b.format || a.way != b.way || !is_name_like(a.format, b.name, a.name)) return 0;
  const std::span<const uint8_t> left = ip_of(a);
  const std::span<const uint8_t> right = ip_of(b);
  const size_t bits =
      std::min({static_cast<size_t>(a.prefix_bits), static_cast<size_t>(b.prefix_bits), left.size() * 8});
  if (bits == 0) return 1;
  return share_bits(left, right, bits) ? 2 : 1;
}

}  // namespace crossrail::ofi
