#include "kv/prefix_cache.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "util/entropy.h"
#include "util/errors.h"

namespace crossrail::kv {

namespace {

constexpr size_t kAhead = 16;  // names whose cache lines are being prefetched at the same time

static_assert(sizeof(PageName) == 32);

}  // namespace

PrefixCache::PrefixCache(size_t pages)
    : pages_(pages), secret_{kernel_entropy().draw_u64(), kernel_entropy().draw_u64()} {
  static_assert(kPrefixCachePageBytes == sizeof(PageName) + 1 + sizeof(Neighbours) + 4 * sizeof(Slot));
  if (pages >= kNotUnheld / 2) throw UsageError("pages=" + std::to_string(pages) + " must be below 2**31");
}

void PrefixCache::check(std::span<const Page> pages) const {
  for (const Page page : pages)
    if (page >= pages_)
      throw UsageError("page " + std::to_string(page) + " is out of range: the cache has " + std::to_string(pages_) +
                       " pages");
}

// Names are the output of a hash: two of its words distinguish names as well as all of them, once they are mixed with a
// secret.
uint32_t PrefixCache::hash_of(const PageName& name) const {
  std::array<uint64_t, 2> words;
  std::memcpy(words.data(), name.data(), sizeof words);
  const auto product = static_cast<unsigned __int128>(words[0] ^ secret_[0]) * (words[1] ^ secret_[1]);
  const uint64_t mixed = static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  return static_cast<uint32_t>(mixed ^ (mixed >> 32));
}

size_t PrefixCache::find(const PageName& name, uint32_t hash) const {
  const size_t mask = table_.size() - 1;
  for (size_t at = hash & mask;; at = (at + 1) & mask) {
    const Slot& slot = table_[at];
    if (slot.page_and_one == 0) return at;
    if (slot.hash == hash && names_[slot.page_and_one - 1] == name) return at;
  }
}

std::vector<Page> PrefixCache::match(std::span<const PageName> names) const {
  std::vector<Page> found;
  if (size_ == 0) return found;
  const size_t mask = table_.size() - 1;
  std::array<uint32_t, kAhead> hashes;
  for (size_t begin = 0; begin < names.size(); begin += kAhead) {
    const size_t count = std::min(kAhead, names.size() - begin);
    for (size_t i = 0; i < count; ++i) {
      hashes[i] = hash_of(names[begin + i]);
      __builtin_prefetch(&table_[hashes[i] & mask]);
    }
    for (size_t i = 0; i < count; ++i) {
      const Slot& slot = table_[hashes[i] & mask];
      if (slot.page_and_one != 0) __builtin_prefetch(&names_[slot.page_and_one - 1]);
    }
    for (size_t i = 0; i < count; ++i) {
      const Slot& slot = table_[find(names[begin + i], hashes[i])];
      if (slot.page_and_one == 0) return found;
      found.push_back(slot.page_and_one - 1);
    }
  }
  return found;
}

size_t PrefixCache::count_unheld(std::span<const Page> pages) const {
  check(pages);
  return static_cast<size_t>(std::count_if(pages.begin(), pages.end(), [&](Page page) { return is_unheld(page); }));
}

void PrefixCache::unlink(Page page) {
  Neighbours& own = ring_[page];
  ring_[own.before].after = own.after;
  ring_[own.after].before = own.before;
  own = {};
  --unheld_;
}

void PrefixCache::hold(std::span<const Page> pages) {
  check(pages);
  for (const Page page : pages)
    if (is_unheld(page)) unlink(page);
}

std::vector<Page> PrefixCache::let_go(std::span<const Page> pages) {
  check(pages);
  std::vector<Page> named;
  for (const Page page : pages) {
    if (!is_named(page)) continue;
    named.push_back(page);
    if (is_unheld(page)) continue;
    const auto end = static_cast<Page>(pages_);
    const Page last = ring_[end].before;
    ring_[page] = {last, end};
    ring_[last].after = page;
    ring_[end].before = page;
    ++unheld_;
  }
  return named;
}

void PrefixCache::add(std::span<const Page> pages, std::span<const PageName> names) {
  check(pages);
  if (pages.size() != names.size())
    throw UsageError("names has " + std::to_string(names.size()) + " entries, must have " +
                     std::to_string(pages.size()) + ", one for each of pages");
  if (pages.empty()) return;
  if (table_.empty()) {
    const auto end = static_cast<Page>(pages_);
    names_.resize(pages_);
    named_.resize(pages_);
    ring_.resize(pages_ + 1);
    ring_[end] = {end, end};
    table_.resize(std::bit_ceil(2 * pages_));
  }
  const size_t mask = table_.size() - 1;
  std::array<uint32_t, kAhead> hashes;
  for (size_t begin = 0; begin < names.size(); begin += kAhead) {
    const size_t count = std::min(kAhead, names.size() - begin);
    for (size_t i = 0; i < count; ++i) {
      hashes[i] = hash_of(names[begin + i]);
      __builtin_prefetch(&table_[hashes[i] & mask], 1);
    }
    for (size_t i = 0; i < count; ++i) {
      const Page page = pages[begin + i];
      if (named_[page] != 0) continue;
      Slot& slot = table_[find(names[begin + i], hashes[i])];
      if (slot.page_and_one != 0) continue;
      slot = {hashes[i], page + 1};
      names_[page] = names[begin + i];
      named_[page] = 1;
      ++size_;
    }
  }
}

void PrefixCache::forget(Page page) {
  if (is_unheld(page)) unlink(page);
  named_[page] = 0;
  --size_;
  const size_t mask = table_.size() - 1;
  size_t gap = hash_of(names_[page]) & mask;
  while (table_[gap].page_and_one != page + 1) gap = (gap + 1) & mask;
  // An entry further on that is found from a place not behind the gap moves into it.
  for (size_t at = (gap + 1) & mask; table_[at].page_and_one != 0; at = (at + 1) & mask) {
    const size_t home = table_[at].hash & mask;
    if (((at - home) & mask) < ((at - gap) & mask)) continue;
    table_[gap] = table_[at];
    gap = at;
  }
  table_[gap] = {};
}

std::vector<Page> PrefixCache::evict(size_t count) {
  std::vector<Page> victims;
  if (unheld_ == 0) return victims;
  victims.reserve(std::min(count, unheld_));
  while (victims.size() < count && unheld_ > 0) {
    victims.push_back(ring_[pages_].after);
    forget(victims.back());
  }
  return victims;
}

std::vector<Page> PrefixCache::clear() {
  std::vector<Page> victims = evict(unheld_);
  std::fill(named_.begin(), named_.end(), uint8_t{0});
  std::fill(table_.begin(), table_.end(), Slot{});
  size_ = 0;
  return victims;
}

}  // namespace crossrail::kv
