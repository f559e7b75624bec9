#include "kv/page_names.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

namespace crossrail::kv {

static_assert(std::endian::native == std::endian::little);  // tokens are hashed in their memory format

std::vector<PageName> page_names(std::span<const uint8_t, 64> first, std::span<const uint32_t> tokens,
                                 size_t page_tokens) {
  const size_t page_bytes = page_tokens * sizeof(uint32_t);
  std::vector<PageName> names(tokens.size() / page_tokens);
  const auto* at = reinterpret_cast<const uint8_t*>(tokens.data());
  Sha256State state = kSha256Start;
  sha256_block(state, first.data());
  std::array<uint8_t, 64> last{};  // pads a page that is no whole number of blocks with zeros
  for (PageName& name : names) {
    for (size_t begin = 0; begin < page_bytes; begin += last.size()) {
      const size_t length = std::min(last.size(), page_bytes - begin);
      if (length < last.size()) std::memcpy(last.data(), at + begin, length);
      sha256_block(state, length < last.size() ? last.data() : at + begin);
    }
    name = sha256_bytes(state);
    at += page_bytes;
  }
  return names;
}

}  // namespace crossrail::kv
