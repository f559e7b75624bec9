// The messages before the first frame, from a stranger: what decodes is what the bytes say.
#include "fuzz.h"
#include "transport/tcp/handshake.h"

namespace crossrail::fuzz {
namespace {

void check(Input message) {
  using namespace tcp;
  uint16_t version = 0;
  const auto total = handshake_bytes(message.first(std::min(message.size(), kHandshakeHeadBytes)), &version);
  if (total) require(*total <= kHandshakeBytesMax && *total > kHandshakeHeadBytes, "its length is bounded");
  const auto kind = handshake_kind(message);
  const int decoded = (decode_hello(message) ? 1 : 0) + (decode_challenge(message) ? 1 : 0) +
                      (decode_proof(message) ? 1 : 0) + (decode_refusal(message) ? 1 : 0) +
                      (decode_start_tls(message) ? 1 : 0);
  require(decoded <= 1, "a message is of one kind");
  require(decoded == 0 || kind, "what decodes has a kind");
  if (const auto hello = decode_hello(message)) {
    const Bytes again = encode(*hello);
    require(again.size() == message.size(), "a hello is as long as it was");
    require(decode_hello(again)->sender == hello->sender, "and says the same");
  }
  if (const auto challenge = decode_challenge(message)) {
    require(version != kProtocolVersion || std::ranges::equal(encode(*challenge), message), "a challenge is its bytes");
  }
  if (const auto refusal = decode_refusal(message)) {
    require(std::ranges::all_of(refusal->text, [](char c) { return c >= ' ' && c <= '~'; }), "text can be shown");
  }
}

// With a right head, of the kind that the first byte chooses.
Bytes headed(Input input) {
  Choices choices(input);
  Bytes bytes = {0x58, 0x52, 0x52, 0x54, 1, 0, 0, 0, static_cast<uint8_t>(choices.byte() % 6 + 1)};
  const Input rest = choices.rest().first(std::min<size_t>(choices.rest().size(), 2000));
  bytes.insert(bytes.end(), rest.begin(), rest.end());
  bytes[6] = static_cast<uint8_t>(bytes.size());
  bytes[7] = static_cast<uint8_t>(bytes.size() >> 8);
  return bytes;
}

}  // namespace
}  // namespace crossrail::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace crossrail::fuzz;
  check({data, size});
  check(headed({data, size}));
  return 0;
}
