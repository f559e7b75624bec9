// Maps content to pages, and keeps the order in which unheld pages are evicted.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kv/page_names.h"

namespace crossrail::kv {

using Page = uint32_t;

// Names of pages 0 .. pages - 1. A page with a name is held by leases, or unheld; its owner, the pool, says which.
//
// All costs are per page of the call and independent of the number of pages. Memory, which is allocated by the first
// add(), is at most kPrefixCachePageBytes per page. UsageError for a page out of range, before anything has changed.
// Threads: one at a time.
// Invariant: no two pages have the same name; every unheld page has one.
class PrefixCache {
 public:
  explicit PrefixCache(size_t pages);

  size_t pages() const { return pages_; }
  size_t size() const { return size_; }      // pages with names
  size_t unheld() const { return unheld_; }  // those of them that are unheld

  // The pages of the longest known prefix of names.
  std::vector<Page> match(std::span<const PageName> names) const;
  size_t count_unheld(std::span<const Page> pages) const;
  void hold(std::span<const Page> pages);
  // Nobody holds these any more. Those with names become unheld, in this order, and are returned.
  std::vector<Page> let_go(std::span<const Page> pages);
  // Names held pages: pages[i] gets names[i]. A page keeps the name it has, and a name keeps its page.
  void add(std::span<const Page> pages, std::span<const PageName> names);
  // Removes the names of `count` unheld pages, the longest unheld first, and returns the pages.
  std::vector<Page> evict(size_t count);
  // Removes all names, also of held pages, and returns the pages that were unheld.
  std::vector<Page> clear();

 private:
  // A page's entry in the table: linear probing from `hash` on, at most half of the table in use, and no gaps between
  // an entry and its place by hash: removal moves later entries up.
  struct Slot {
    uint32_t hash = 0;
    uint32_t page_and_one = 0;  // 0: empty
  };
  struct Neighbours {
    Page before = kNotUnheld;
    Page after = kNotUnheld;
  };
  static constexpr Page kNotUnheld = UINT32_MAX;

  void check(std::span<const Page> pages) const;
  bool is_named(Page page) const { return !named_.empty() && named_[page] != 0; }
  bool is_unheld(Page page) const { return !ring_.empty() && ring_[page].after != kNotUnheld; }
  uint32_t hash_of(const PageName& name) const;
  size_t find(const PageName& name, uint32_t hash) const;  // its slot, or the empty one where it would be
  void unlink(Page page);
  void forget(Page page);

  size_t pages_;
  size_t size_ = 0;
  size_t unheld_ = 0;
  // Unknown outside, so that nobody who chooses prompts can tell which names collide in the table.
  std::array<uint64_t, 2> secret_;
  std::vector<Slot> table_;
  std::vector<PageName> names_;   // by page
  std::vector<uint8_t> named_;    // by page
  std::vector<Neighbours> ring_;  // by page, in eviction order; [pages_] is the list's head
};

// A name, whether there is one, two neighbours, and up to four slots.
inline constexpr size_t kPrefixCachePageBytes = 32 + 1 + 8 + 32;

}  // namespace crossrail::kv
