// Names for the content of pages: a hash chain over tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "util/sha256.h"

namespace crossrail::kv {

using PageName = Digest;

// One for each full page of page_tokens tokens; it covers `first` and all tokens up to the page's end.
//
// It is the state that SHA-256 has after `first` and so many pages, each little-endian and filled up with zeros to
// whole blocks of 64 bytes. Two prompts of one name would be a collision of its compression function, or, if one had
// more pages, a block that leads to SHA-256's start: nobody can make up either. Without SHA-256's own end, which is a
// block more, since `first` and page_tokens say how what is hashed is cut. To be secret is not asked of names.
// Threads: any.
std::vector<PageName> page_names(std::span<const uint8_t, 64> first, std::span<const uint32_t> tokens,
                                 size_t page_tokens);

}  // namespace crossrail::kv
