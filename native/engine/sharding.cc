#include "engine/sharding.h"

#include <algorithm>

namespace crossrail {

Range piece_of(uint64_t length_bytes, uint32_t pieces, uint32_t index, uint64_t align) {
  const uint64_t blocks = (length_bytes + align - 1) / align;
  const uint64_t first = blocks / pieces * index + std::min<uint64_t>(index, blocks % pieces);
  const uint64_t count = blocks / pieces + (index < blocks % pieces ? 1 : 0);
  const uint64_t begin = std::min(first * align, length_bytes);
  const uint64_t end = std::min((first + count) * align, length_bytes);
  return {begin, end - begin};
}

uint32_t pieces_for(uint64_t length_bytes, uint32_t rails, uint64_t piece_bytes_min) {
  const uint64_t worth = std::max<uint64_t>(1, length_bytes / piece_bytes_min);
  return static_cast<uint32_t>(std::min<uint64_t>(worth, rails));
}

}  // namespace crossrail
