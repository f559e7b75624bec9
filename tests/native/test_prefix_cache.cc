#include "kv/prefix_cache.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <vector>

#include "kv/page_names.h"
#include "util/errors.h"
#include "util/sha256.h"

namespace crossrail::kv {

namespace {

// So many different names.
std::vector<PageName> names_of(size_t count) {
  const std::array<uint8_t, 64> first{};
  const std::vector<uint32_t> tokens(count, 7);
  return page_names(first, tokens, 1);
}

}  // namespace

TEST_CASE("a page's name is SHA-256's own state: with its end as the last page it is the digest") {
  std::array<uint8_t, 64> first;
  first.fill(0xab);
  std::vector<uint32_t> tokens(48);
  for (size_t i = 0; i < 32; ++i) tokens[i] = static_cast<uint32_t>(i * 2654435761U);
  tokens[32] = 0x80;                                  // FIPS 180-4, 5.1.1: a bit, zeros,
  tokens[47] = __builtin_bswap32(8 * (64 + 32 * 4));  // and how many bits there were before
  const std::span<const uint8_t> text(reinterpret_cast<const uint8_t*>(tokens.data()), 32 * sizeof(uint32_t));

  CHECK(page_names(first, tokens, 16).back() == sha256({first, text}));
  CHECK(page_names(first, tokens, 48).back() == sha256({first, text}));
}

TEST_CASE("a full table finds every page, also after others have left it in any order") {
  constexpr size_t kPages = 5000;  // of 16384 slots
  const std::vector<PageName> names = names_of(kPages);
  std::vector<Page> pages(kPages);
  for (size_t i = 0; i < kPages; ++i) pages[i] = static_cast<Page>((i * 1999) % kPages);
  PrefixCache cache(kPages);
  cache.add(pages, names);
  REQUIRE(cache.size() == kPages);
  REQUIRE(cache.match(names) == pages);

  std::vector<Page> gone;
  std::vector<size_t> left;
  for (size_t i = 0; i < kPages; ++i) {
    if (i % 3 == 0)
      left.push_back(i);
    else
      gone.push_back(pages[i]);
  }
  std::reverse(gone.begin(), gone.end());
  cache.let_go(gone);
  REQUIRE(cache.evict(kPages) == gone);

  CHECK(cache.size() == left.size());
  for (size_t i = 0; i < kPages; ++i) {
    const std::vector<Page> found = cache.match(std::span(names).subspan(i, 1));
    CHECK(found == (i % 3 == 0 ? std::vector{pages[i]} : std::vector<Page>{}));
  }
}

TEST_CASE("a page out of range is refused, and changes nothing") {
  PrefixCache cache(4);
  const std::vector<PageName> names = names_of(2);
  const std::array<Page, 2> pages = {3, 4};

  CHECK_THROWS_AS(cache.add(pages, names), UsageError);
  CHECK_THROWS_AS(cache.let_go(pages), UsageError);
  CHECK_THROWS_AS(cache.add(std::span(pages).first(1), names), UsageError);

  CHECK(cache.size() == 0);
}

}  // namespace crossrail::kv
