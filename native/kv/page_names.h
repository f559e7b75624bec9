// Names for the content of pages: a hash chain over tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "util/sha256.h"

namespace crossrail::kv {

using PageName = Digest;

// One name per full page of page_tokens tokens; it covers `first` and all tokens up to the page's end.
//
// It is the state of SHA-256 after `first` and all pages up to this one, each little-endian and zero-padded to whole
// blocks of 64 bytes. Two prompts with the same name would be a collision of the compression function or, if one had
// more pages, a block that leads to SHA-256's initial state: nobody can construct either. SHA-256's own final block is
// omitted, since `first` and page_tokens determine how the input is split. Names need not be secret.
// Threads: any.
std::vector<PageName> page_names(std::span<const uint8_t, 64> first, std::span<const uint32_t> tokens,
                                 size_t page_tokens);

}  // namespace crossrail::kv
