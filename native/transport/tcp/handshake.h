// Authentication: four messages before the first frame.
//
//   initiator                                     acceptor
//   Hello {target tag, nonce, link, channel} ->
//                                             <-  Challenge {nonce, proof that it holds the key}
//   Proof {that we hold the key}             ->
//                                             <-  Accept
//
// The key is derived from the shared secret and the acceptor's incarnation, 128 random bits that are known only from
// its address. So without a secret, whoever was never given the address is kept out; with one, whoever cannot compute
// HMAC-SHA256 with it. Both proofs cover the whole Hello and both nonces. Without TLS, frames after the handshake are
// neither encrypted nor signed.
//
// With TLS the initiator first says so, in the clear: StartTls {target tag}. An initiator that does not know the
// engine's tag cannot make it do any TLS. Everything that follows on this connection, the four messages and every
// frame, travels in TLS 1.3; both proofs then cover its channel binding too (RFC 9266), so that nobody with a
// certificate of the same CA can stand in between. An acceptor without TLS refuses StartTls, and one with TLS refuses a
// Hello in the clear, both in the clear: neither side gives way.
//
// Either side may answer with a Refusal instead. The first eight bytes of a message mean the same in every version.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "transport/descriptor.h"
#include "util/sha256.h"

namespace crossrail::tcp {

inline constexpr uint16_t kProtocolVersion = 5;
inline constexpr size_t kHandshakeHeadBytes = 8;         // magic, version, total length
inline constexpr size_t kHandshakeBytesMax = 2048;       // of one message: all that a stranger makes us keep
inline constexpr uint32_t kHandshakeMagic = 0x54525258;  // "XRRT"

using Nonce = std::array<uint8_t, 32>;
Nonce draw_nonce();  // throws TransportError when the kernel gives no random bytes

struct StartTls {
  std::array<uint8_t, 8> target_tag{};
};
struct Hello {
  std::array<uint8_t, 8> target_tag{};  // of the incarnation we want: says whom, gives nothing away
  Nonce nonce{};
  uint64_t link_id = 0;
  uint32_t channel = 0;
  uint32_t epoch = 0;    // which connection of the channel this is
  bool resumes = false;  // the link has carried operations already
  bool is_bulk = false;
  Address sender;
};
struct Challenge {
  Nonce nonce{};
  Digest proof{};
};
struct Proof {
  Digest proof{};
};
struct Accept {};
enum class RefusalCode : uint8_t {
  kMalformed = 1,
  kVersion,
  kNotMe,  // another incarnation, or another engine, lives here now
  kAuthentication,
  kUnknownLink,  // it forgot the link that was to be resumed
  kStale,        // a later connection of the channel exists
  kClosing,
  kFull
};
struct Refusal {
  RefusalCode code = RefusalCode::kMalformed;
  std::string text;
};

enum class HandshakeKind : uint8_t { kHello = 1, kChallenge, kProof, kAccept, kRefusal, kStartTls };

Bytes encode(const StartTls& start);
Bytes encode(const Hello& hello);
Bytes encode(const Challenge& challenge);
Bytes encode(const Proof& proof);
Bytes encode(const Accept& accept);
Bytes encode(const Refusal& refusal);

// Of the first kHandshakeHeadBytes: how long the whole message is, or nothing when it is none of ours. *version as
// given.
std::optional<size_t> handshake_bytes(std::span<const uint8_t> head, uint16_t* version);

// Of a whole message. Nothing when it is malformed or of another kind.
std::optional<HandshakeKind> handshake_kind(std::span<const uint8_t> message);
std::optional<StartTls> decode_start_tls(std::span<const uint8_t> message);
std::optional<Hello> decode_hello(std::span<const uint8_t> message);
std::optional<Challenge> decode_challenge(std::span<const uint8_t> message);
std::optional<Proof> decode_proof(std::span<const uint8_t> message);
std::optional<Refusal> decode_refusal(std::span<const uint8_t> message);

std::array<uint8_t, 8> target_tag(const Incarnation& incarnation);
Digest handshake_key(std::string_view secret, const Incarnation& acceptor);
// What a proof covers. binding: the TLS session's; empty without TLS.
struct Proven {
  std::span<const uint8_t> hello;
  const Nonce& acceptor_nonce;
  std::span<const uint8_t> binding;
};
Digest acceptor_proof(const Digest& key, const Proven& what);
Digest initiator_proof(const Digest& key, const Proven& what);
// Why a proof is not what it should be, for both sides.
std::string no_proof_text(bool under_tls);

}  // namespace crossrail::tcp
