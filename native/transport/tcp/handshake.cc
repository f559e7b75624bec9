#include "transport/tcp/handshake.h"

#include <algorithm>

#include "transport/tcp/frames.h"
#include "util/codec.h"
#include "util/entropy.h"
#include "util/errors.h"

namespace crossrail::tcp {

namespace {

constexpr uint8_t kFlagResumes = 1;
constexpr uint8_t kFlagBulk = 2;

std::span<const uint8_t> bytes_of(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// magic u32, version u16, total length u16, kind u8; then the body.
Writer begin(HandshakeKind kind) {
  Writer writer;
  writer.put(kHandshakeMagic);
  writer.put(kProtocolVersion);
  writer.put(uint16_t{0});
  writer.put(static_cast<uint8_t>(kind));
  return writer;
}

Bytes end(Writer& writer) {
  Bytes bytes = std::move(writer.bytes());
  CROSSRAIL_ASSERT(bytes.size() <= kHandshakeBytesMax);
  const auto total = static_cast<uint16_t>(bytes.size());
  bytes[6] = static_cast<uint8_t>(total & 0xff);
  bytes[7] = static_cast<uint8_t>(total >> 8);
  return bytes;
}

// The body, if the message is complete and of this kind.
std::optional<Reader> open(std::span<const uint8_t> message, HandshakeKind kind) {
  if (handshake_kind(message) != kind) return std::nullopt;
  return Reader(message.subspan(kHandshakeHeadBytes + 1));
}

// StartTls, Challenge and Proof have fixed fields, one after the other.
template <typename... Fields>
bool read_fields(std::span<const uint8_t> message, HandshakeKind kind, Fields&... fields) {
  auto reader = open(message, kind);
  if (!reader) return false;
  (reader->get_bytes(fields), ...);
  return reader->finished();
}

Digest prove(const Digest& key, std::string_view role, const Proven& what) {
  return hmac_sha256(key, {bytes_of(role), what.hello, what.acceptor_nonce, what.binding});
}

}  // namespace

Nonce draw_nonce() {
  Nonce nonce;
  kernel_entropy().fill(nonce);
  return nonce;
}

Bytes encode(const StartTls& start) {
  Writer writer = begin(HandshakeKind::kStartTls);
  writer.put_bytes(start.target_tag);
  return end(writer);
}

Bytes encode(const Hello& hello) {
  Writer writer = begin(HandshakeKind::kHello);
  writer.put_bytes(hello.target_tag);
  writer.put_bytes(hello.nonce);
  writer.put(hello.link_id);
  writer.put(hello.channel);
  writer.put(hello.epoch);
  writer.put(static_cast<uint8_t>((hello.resumes ? kFlagResumes : 0) | (hello.is_bulk ? kFlagBulk : 0)));
  const Bytes sender = hello.sender.encode();
  writer.put(static_cast<uint16_t>(sender.size()));
  writer.put_bytes(sender);
  return end(writer);
}

Bytes encode(const Challenge& challenge) {
  Writer writer = begin(HandshakeKind::kChallenge);
  writer.put_bytes(challenge.nonce);
  writer.put_bytes(challenge.proof);
  return end(writer);
}

Bytes encode(const Proof& proof) {
  Writer writer = begin(HandshakeKind::kProof);
  writer.put_bytes(proof.proof);
  return end(writer);
}

Bytes encode(const Accept&) {
  Writer writer = begin(HandshakeKind::kAccept);
  return end(writer);
}

Bytes encode(const Refusal& refusal) {
  Writer writer = begin(HandshakeKind::kRefusal);
  writer.put(static_cast<uint8_t>(refusal.code));
  const std::string text = refusal.text.substr(0, kTextBytesMax);
  writer.put(static_cast<uint16_t>(text.size()));
  writer.put_bytes(bytes_of(text));
  return end(writer);
}

std::optional<size_t> handshake_bytes(std::span<const uint8_t> head, uint16_t* version) {
  Reader reader(head);
  const auto magic = reader.get<uint32_t>();
  *version = reader.get<uint16_t>();
  const size_t total = reader.get<uint16_t>();
  if (!reader.ok() || magic != kHandshakeMagic || total <= kHandshakeHeadBytes || total > kHandshakeBytesMax) {
    return std::nullopt;
  }
  return total;
}

std::optional<HandshakeKind> handshake_kind(std::span<const uint8_t> message) {
  uint16_t version;
  if (message.size() <= kHandshakeHeadBytes || handshake_bytes(message, &version) != message.size())
    return std::nullopt;
  const uint8_t kind = message[kHandshakeHeadBytes];
  if (kind < static_cast<uint8_t>(HandshakeKind::kHello) || kind > static_cast<uint8_t>(HandshakeKind::kStartTls)) {
    return std::nullopt;
  }
  return static_cast<HandshakeKind>(kind);
}

std::optional<StartTls> decode_start_tls(std::span<const uint8_t> message) {
  StartTls start;
  if (!read_fields(message, HandshakeKind::kStartTls, start.target_tag)) return std::nullopt;
  return start;
}

std::optional<Hello> decode_hello(std::span<const uint8_t> message) {
  auto reader = open(message, HandshakeKind::kHello);
  if (!reader) return std::nullopt;
  Hello hello;
  reader->get_bytes(hello.target_tag);
  reader->get_bytes(hello.nonce);
  hello.link_id = reader->get<uint64_t>();
  hello.channel = reader->get<uint32_t>();
  hello.epoch = reader->get<uint32_t>();
  const auto flags = reader->get<uint8_t>();
  hello.resumes = (flags & kFlagResumes) != 0;
  hello.is_bulk = (flags & kFlagBulk) != 0;
  const size_t address_bytes = reader->get<uint16_t>();
  if (!reader->ok() || reader->rest().size() != address_bytes) return std::nullopt;
  try {
    hello.sender = Address::decode(reader->rest());
  } catch (const UsageError&) {
    return std::nullopt;
  }
  return hello;
}

std::optional<Challenge> decode_challenge(std::span<const uint8_t> message) {
  Challenge challenge;
  if (!read_fields(message, HandshakeKind::kChallenge, challenge.nonce, challenge.proof)) return std::nullopt;
  return challenge;
}

std::optional<Proof> decode_proof(std::span<const uint8_t> message) {
  Proof proof;
  if (!read_fields(message, HandshakeKind::kProof, proof.proof)) return std::nullopt;
  return proof;
}

std::optional<Refusal> decode_refusal(std::span<const uint8_t> message) {
  auto reader = open(message, HandshakeKind::kRefusal);
  if (!reader) return std::nullopt;
  const auto code = reader->get<uint8_t>();
  const size_t text_bytes = reader->get<uint16_t>();
  if (!reader->ok() || reader->rest().size() != text_bytes || text_bytes > kTextBytesMax) return std::nullopt;
  if (code < static_cast<uint8_t>(RefusalCode::kMalformed) || code > static_cast<uint8_t>(RefusalCode::kFull)) {
    return std::nullopt;
  }
  return Refusal{static_cast<RefusalCode>(code), text_of(std::as_bytes(reader->rest()))};
}

std::array<uint8_t, 8> target_tag(const Incarnation& incarnation) {
  const Digest digest = sha256({bytes_of("crossrail tcp target"), incarnation});
  std::array<uint8_t, 8> tag;
  std::copy_n(digest.begin(), tag.size(), tag.begin());
  return tag;
}

Digest handshake_key(std::string_view secret, const Incarnation& acceptor) {
  return hmac_sha256(bytes_of(secret), {bytes_of("crossrail tcp key"), acceptor});
}

Digest acceptor_proof(const Digest& key, const Proven& what) { return prove(key, "acceptor", what); }

Digest initiator_proof(const Digest& key, const Proven& what) { return prove(key, "initiator", what); }

std::string no_proof_text(bool under_tls) {
  return std::string("the two engines do not have the same secret") +
         (under_tls ? ", or somebody in between intercepts the connection" : "") +
         ": set the same `secret` (or CROSSRAIL_SECRET) on both sides";
}

}  // namespace crossrail::tcp
