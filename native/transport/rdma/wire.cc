#include "transport/rdma/wire.h"

#include <algorithm>

#include "transport/foreign_text.h"
#include "transport/refusal.h"
#include "util/codec.h"
#include "util/errors.h"

namespace crossrail::rdma {

namespace {

constexpr uint32_t kMagic = 0x47445258;  // "XRDG"
constexpr uint8_t kFlagToLeader = 1;
constexpr uint8_t kFlagHasLink = 2;
constexpr uint8_t kStateHasLink = 1;
constexpr uint8_t kStateLeaves = 2;
constexpr size_t kHeadBytesMax = 4 + 2 + 1 + 1 + 8 + 8 + 16 + 8 + 8 + 1 + kEndpointBytesMax;
// The longest body is a Resolve with the maximum number of spans.
static_assert(kHeadBytesMax + (2 + 4 + 8 + 1 + kSpansMax * 25) + kMacBytes <= kDatagramBytesMax);
static_assert(kHeadBytesMax + (1 + 2 + kTextBytesMax) + kMacBytes <= kDatagramBytesMax);
static_assert(kHeadBytesMax + (2 + 4 + 8 + 1 + kOfferBytesMax) + kMacBytes <= kDatagramBytesMax);

std::span<const uint8_t> bytes_of(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// Appends to bytes what a Writer writes.
template <typename Write>
void append(Bytes& bytes, Write&& write) {
  Writer writer;
  writer.bytes().swap(bytes);
  write(writer);
  writer.bytes().swap(bytes);
}

void put_key(Writer& writer, PathKey key) {
  writer.put(key.leader_rail);
  writer.put(key.other_rail);
}

PathKey get_key(Reader& reader) {
  PathKey key;
  key.leader_rail = reader.get<uint8_t>();
  key.other_rail = reader.get<uint8_t>();
  return key;
}

bool is_rail(PathKey key) { return key.leader_rail < kRailsMax && key.other_rail < kRailsMax; }

Bytes get_short(Reader& reader, size_t bytes_max) {
  Bytes bytes(reader.get<uint8_t>());
  if (bytes.size() > bytes_max) bytes.resize(bytes_max + 1);  // too long: the caller checks
  reader.get_bytes(bytes);
  return bytes;
}

Digest mac_of(std::span<const uint8_t> bytes, const Digest& key) { return hmac_sha256(key, {bytes}); }

}  // namespace

// --- datagrams ---

Bytes begin_datagram(const DatagramHead& head) {
  Writer writer;
  writer.put(kMagic);
  writer.put(head.version);
  writer.put(static_cast<uint8_t>(head.kind));
  writer.put(static_cast<uint8_t>((head.to_leader ? kFlagToLeader : 0) | (head.has_link ? kFlagHasLink : 0)));
  writer.put(head.nonce);  // up to here the same in every version; the rest of the header from version 3 on
  writer.put_bytes(head.target_tag);
  writer.put_bytes(head.sender);
  writer.put(head.sender_session);
  writer.put(head.target_session);
  writer.put(static_cast<uint8_t>(head.endpoint.size()));
  writer.put_bytes(head.endpoint);
  return std::move(writer.bytes());
}

void put(Bytes& bytes, const PathBody& body) {
  append(bytes, [&](Writer& writer) {
    put_key(writer, body.path);
    writer.put(body.epoch);
    writer.put(body.token);
    writer.put(static_cast<uint8_t>(body.offer.size()));
    writer.put_bytes(body.offer);
    writer.put(body.speed_mbps);
  });
}

void put(Bytes& bytes, const RefuseBody& body) {
  append(bytes, [&](Writer& writer) { writer.put(static_cast<uint8_t>(body.code)); });
  put_text(bytes, body.text);
}

void put(Bytes& bytes, const ResolveBody& body) {
  append(bytes, [&](Writer& writer) {
    put_key(writer, body.path);
    writer.put(body.epoch);
    writer.put(body.question);
    writer.put(static_cast<uint8_t>(body.spans.size()));
    for (const Span& span : body.spans) {
      writer.put(span.region_id);
      writer.put(span.offset);
      writer.put(span.length_bytes);
      writer.put(static_cast<uint8_t>((span.writes ? 1 : 0) | (span.reads ? 2 : 0)));
    }
  });
}

void put(Bytes& bytes, const ResolvedBody& body) {
  append(bytes, [&](Writer& writer) {
    put_key(writer, body.path);
    writer.put(body.epoch);
    writer.put(body.question);
    writer.put(static_cast<uint8_t>(body.counts ? 1 : 0));
    writer.put(body.seen);
    writer.put(static_cast<uint8_t>(body.verdicts.size()));
    for (const Status verdict : body.verdicts) writer.put(static_cast<uint8_t>(verdict));
  });
}

void put_text(Bytes& bytes, const std::string& text) {
  append(bytes, [&](Writer& writer) {
    const std::string_view cut = std::string_view(text).substr(0, kTextBytesMax);
    writer.put(static_cast<uint16_t>(cut.size()));
    writer.put_bytes(bytes_of(cut));
  });
}

void seal(Bytes& bytes, const Digest& key) {
  const Digest mac = mac_of(bytes, key);
  bytes.insert(bytes.end(), mac.begin(), mac.begin() + kMacBytes);
  CROSSRAIL_ASSERT(bytes.size() <= kDatagramBytesMax);
}

bool is_sealed(std::span<const uint8_t> bytes, const Digest& key) {
  if (bytes.size() < kMacBytes) return false;
  const Digest mac = mac_of(bytes.first(bytes.size() - kMacBytes), key);
  return equal_in_constant_time(bytes.last(kMacBytes), std::span(mac).first(kMacBytes));
}

std::optional<Datagram> decode_datagram(std::span<const uint8_t> bytes) {
  if (bytes.size() > kDatagramBytesMax || bytes.size() < kMacBytes) return std::nullopt;
  Reader reader(bytes.first(bytes.size() - kMacBytes));
  Datagram datagram;
  DatagramHead& head = datagram.head;
  if (reader.get<uint32_t>() != kMagic) return std::nullopt;
  head.version = reader.get<uint16_t>();
  const auto kind = reader.get<uint8_t>();
  const auto flags = reader.get<uint8_t>();
  head.nonce = reader.get<uint64_t>();
  if (!reader.ok() || kind < static_cast<uint8_t>(DatagramKind::kKnock) ||
      kind > static_cast<uint8_t>(DatagramKind::kBye)) {
    return std::nullopt;
  }
  head.kind = static_cast<DatagramKind>(kind);
  head.to_leader = (flags & kFlagToLeader) != 0;
  head.has_link = (flags & kFlagHasLink) != 0;
  reader.get_bytes(head.target_tag);
  reader.get_bytes(head.sender);
  head.sender_session = reader.get<uint64_t>();
  head.target_session = reader.get<uint64_t>();
  head.endpoint = get_short(reader, kEndpointBytesMax);
  const bool has_endpoint = reader.ok() && head.endpoint.size() <= kEndpointBytesMax && !head.endpoint.empty();
  if (head.version != kProtocolVersion) {
    if (!has_endpoint) head.endpoint.clear();
    return datagram;
  }
  if (!has_endpoint) return std::nullopt;
  datagram.body = reader.rest();
  return datagram;
}

std::optional<PathBody> decode_path(std::span<const uint8_t> bytes) {
  Reader reader(bytes);
  PathBody body;
  body.path = get_key(reader);
  body.epoch = reader.get<uint32_t>();
  body.token = reader.get<uint64_t>();
  body.offer = get_short(reader, kOfferBytesMax);
  body.speed_mbps = reader.get<uint32_t>();
  if (!reader.finished() || !is_rail(body.path) || body.offer.size() > kOfferBytesMax) return std::nullopt;
  return body;
}

std::optional<RefuseBody> decode_refuse(std::span<const uint8_t> bytes) {
  Reader reader(bytes);
  RefuseBody body;
  const auto code = reader.get<uint8_t>();
  if (!reader.ok() || code < static_cast<uint8_t>(RefuseCode::kMalformed) ||
      code > static_cast<uint8_t>(RefuseCode::kFull)) {
    return std::nullopt;
  }
  body.code = static_cast<RefuseCode>(code);
  const auto text = decode_text(reader.rest());
  if (!text) return std::nullopt;
  body.text = *text;
  return body;
}

std::optional<ResolveBody> decode_resolve(std::span<const uint8_t> bytes) {
  Reader reader(bytes);
  ResolveBody body;
  body.path = get_key(reader);
  body.epoch = reader.get<uint32_t>();
  body.question = reader.get<uint64_t>();
  const size_t count = reader.get<uint8_t>();
  if (!reader.ok() || !is_rail(body.path) || count > kSpansMax) return std::nullopt;
  for (size_t i = 0; i < count; ++i) {
    Span& span = body.spans.emplace_back();
    span.region_id = reader.get<uint64_t>();
    span.offset = reader.get<uint64_t>();
    span.length_bytes = reader.get<uint64_t>();
    const auto flags = reader.get<uint8_t>();
    span.writes = (flags & 1) != 0;
    span.reads = (flags & 2) != 0;
  }
  return reader.finished() ? std::optional(body) : std::nullopt;
}

std::optional<ResolvedBody> decode_resolved(std::span<const uint8_t> bytes) {
  Reader reader(bytes);
  ResolvedBody body;
  body.path = get_key(reader);
  body.epoch = reader.get<uint32_t>();
  body.question = reader.get<uint64_t>();
  body.counts = reader.get<uint8_t>() != 0;
  body.seen = reader.get<uint64_t>();
  const size_t count = reader.get<uint8_t>();
  if (!reader.ok() || !is_rail(body.path) || count > kSpansMax) return std::nullopt;
  for (size_t i = 0; i < count; ++i) {
    const auto verdict = reader.get<uint8_t>();
    if (verdict != static_cast<uint8_t>(Status::kDone) && !is_refusal(verdict)) return std::nullopt;
    body.verdicts.push_back(static_cast<Status>(verdict));
  }
  return reader.finished() ? std::optional(body) : std::nullopt;
}

std::optional<std::string> decode_text(std::span<const uint8_t> bytes) {
  Reader reader(bytes);
  const size_t length = reader.get<uint16_t>();
  if (!reader.ok() || reader.rest().size() != length || length > kTextBytesMax) return std::nullopt;
  return shown(std::string(reinterpret_cast<const char*>(reader.rest().data()), length));
}

std::array<uint8_t, 8> target_tag(const Incarnation& incarnation) {
  const Digest digest = sha256({bytes_of("crossrail rdma target"), incarnation});
  std::array<uint8_t, 8> tag;
  std::copy_n(digest.begin(), tag.size(), tag.begin());
  return tag;
}

Digest session_key(std::string_view secret, const Incarnation& leader, const Incarnation& other) {
  return hmac_sha256(bytes_of(secret), {bytes_of("crossrail rdma key"), leader, other});
}

// --- fragments ---

Bytes begin_fragment(uint64_t token, FragmentKind kind) {
  Writer writer;
  writer.put(token);
  writer.put(static_cast<uint8_t>(kind));
  return std::move(writer.bytes());
}

void put(Bytes& bytes, const StateBody& body) {
  append(bytes, [&](Writer& writer) {
    writer.put(body.number);
    writer.put(static_cast<uint8_t>((body.has_link ? kStateHasLink : 0) | (body.leaves ? kStateLeaves : 0)));
  });
}

std::optional<StateBody> decode_state(std::span<const uint8_t> bytes) {
  Reader reader(bytes);
  StateBody body;
  body.number = reader.get<uint32_t>();
  const auto flags = reader.get<uint8_t>();
  body.has_link = (flags & kStateHasLink) != 0;
  body.leaves = (flags & kStateLeaves) != 0;
  return reader.finished() ? std::optional(body) : std::nullopt;
}

void put(Bytes& bytes, const ServiceHead& head) {
  append(bytes, [&](Writer& writer) {
    writer.put(head.id);
    writer.put(head.first_open);
  });
}

std::optional<ServiceHead> decode_service_head(std::span<const uint8_t> body) {
  Reader reader(body);
  ServiceHead head;
  head.id = reader.get<uint64_t>();
  head.first_open = reader.get<uint64_t>();
  if (!reader.ok() || head.first_open == 0 || head.id < head.first_open ||
      head.id - head.first_open >= kServicesUnderWayMax) {
    return std::nullopt;
  }
  return head;
}

void put(Bytes& bytes, const RecallBody& body) {
  append(bytes, [&](Writer& writer) {
    writer.put(body.id);
    writer.put(body.first_open);
  });
}

std::optional<RecallBody> decode_recall(std::span<const uint8_t> bytes) {
  Reader reader(bytes);
  RecallBody body;
  body.id = reader.get<uint64_t>();
  body.first_open = reader.get<uint64_t>();
  const bool is_good = reader.finished() && body.first_open >= 1 && body.first_open <= body.id &&
                       body.id - body.first_open < kMessagesUnderWayMax;
  return is_good ? std::optional(body) : std::nullopt;
}

void put(Bytes& bytes, const MessageHead& head) {
  append(bytes, [&](Writer& writer) {
    writer.put(head.id);
    writer.put(head.first_open);
    writer.put(head.length_bytes);
    writer.put(head.chunk);
  });
}

std::optional<MessageHead> decode_message_head(std::span<const uint8_t> body) {
  Reader reader(body);
  MessageHead head;
  head.id = reader.get<uint64_t>();
  head.first_open = reader.get<uint64_t>();
  head.length_bytes = reader.get<uint32_t>();
  head.chunk = reader.get<uint32_t>();
  if (!reader.ok()) return std::nullopt;
  return head;
}

}  // namespace crossrail::rdma
