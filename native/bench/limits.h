// What this machine can do without crossrail: the figures that every measure is compared with, in the same run.
//
// Pure loops, no engine. All return nanoseconds. Threads: the caller's; pin it as the measured loop is pinned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "bench/guard.h"

namespace crossrail::bench {

// glibc memcpy of all of `src` to `dst` in calls of `call_bytes`. dst must be at least as long.
int64_t copy_in_calls(std::span<std::byte> dst, std::span<const std::byte> src, uint64_t call_bytes);

// glibc memcpy of page src_pages[i] to page dst_pages[i], for each i. Indices are checked before the clock starts.
int64_t copy_pages(std::span<std::byte> dst, std::span<const std::byte> src, std::span<const int64_t> dst_pages,
                   std::span<const int64_t> src_pages, uint64_t page_bytes);

// The least that posting a page can cost: reads both indices and fills in one 64-byte work request, in a ring of 4096.
int64_t fill_work_requests(std::span<const int64_t> dst_pages, std::span<const int64_t> src_pages, uint64_t page_bytes,
                           uint64_t rounds);

// `rounds` round trips of a flag between two processes that map the same `page` (five cache lines of it).
// The flags count up from `start`, so that a second run on the same page starts where the first one ended.
int64_t flag_ping_pong(std::span<std::byte> page, bool first, uint64_t start, uint64_t rounds, Guard& guard);

// Processes that map the same `page`, zeroed at first, begin together: returns once `due` have arrived since then, this
// one included. sleeps: for those that share their core with one that still works, and would keep it waiting by
// spinning or yielding. Nothing may be read behind it.
void pass_gate(std::span<std::byte> page, uint32_t due, bool sleeps, Guard& guard);

// When a thread that does nothing else sees each increment of a word: seen_ns[i], on now_ns()'s clock, is when the word
// was first seen above i. Nobody can react sooner.
void spin_on_word(std::span<std::byte> word, std::span<int64_t> seen_ns, Guard& guard);

// `count` records of 8 bytes and a number through a bare ring of 256 cache lines in memory that two processes map: the
// upper bound for small one-way operations. `memory` holds kStreamBytes; its first run starts from zeroed memory, and
// `start` is the sum of the counts of earlier runs, as above.
inline constexpr size_t kStreamBytes = 32 * 1024;
int64_t slot_stream(std::span<std::byte> memory, bool producer, uint64_t start, uint64_t count, Guard& guard);

}  // namespace crossrail::bench
