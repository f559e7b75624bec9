#include "bench/limits.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "util/clock.h"
#include "util/errors.h"
#include "util/futex.h"

namespace crossrail::bench {
namespace {

constexpr size_t kCacheLineBytes = 64;
constexpr size_t kRingSlots = 4096;

// volatile: the compiler must call glibc, as a user's program does, and not inline its own copy.
void* (*volatile glibc_memcpy)(void*, const void*, size_t) = std::memcpy;

// One record of slot_stream. Invariant: the slot of record n (from 1) holds number == n once its payload is there.
struct alignas(kCacheLineBytes) StreamSlot {
  std::atomic<uint64_t> number;
  uint64_t payload;
};
constexpr size_t kStreamSlots = 256;
// The consumer reports its progress once per this many records: half the ring, so that neither side waits for the
// other.
constexpr uint64_t kStreamReport = 128;
static_assert(kStreamSlots * sizeof(StreamSlot) + kCacheLineBytes <= kStreamBytes);

// The fields of an RDMA work request with one scatter-gather entry.
struct alignas(kCacheLineBytes) BareWorkRequest {
  uint64_t id;
  uint64_t next;
  uint64_t local_address;
  uint64_t remote_address;
  uint32_t length_bytes;
  uint32_t local_key;
  uint32_t remote_key;
  uint32_t imm;
  uint32_t opcode;
  uint32_t flags;
};
static_assert(sizeof(BareWorkRequest) == kCacheLineBytes);

void check_pages(const char* what, std::span<const int64_t> pages, uint64_t page_bytes, size_t memory_bytes) {
  const auto page_count = static_cast<int64_t>(memory_bytes / page_bytes);
  for (const int64_t page : pages) {
    if (page < 0 || page >= page_count) {
      throw UsageError(std::string(what) + " holds " + std::to_string(page) + ", but the memory has " +
                       std::to_string(page_count) + " pages");
    }
  }
}

void check_same_count(std::span<const int64_t> dst_pages, std::span<const int64_t> src_pages) {
  if (dst_pages.size() == src_pages.size()) return;
  throw UsageError("dst_pages has " + std::to_string(dst_pages.size()) + " entries and src_pages " +
                   std::to_string(src_pages.size()));
}

void check_not_zero(const char* what, uint64_t value) {
  if (value == 0) throw UsageError(std::string(what) + " is 0 and must be at least 1");
}

}  // namespace

int64_t copy_in_calls(std::span<std::byte> dst, std::span<const std::byte> src, uint64_t call_bytes) {
  check_not_zero("call_bytes", call_bytes);
  if (dst.size() < src.size()) throw UsageError("dst is shorter than src");
  const int64_t start_ns = now_ns();
  for (size_t offset = 0; offset < src.size(); offset += call_bytes) {
    glibc_memcpy(dst.data() + offset, src.data() + offset, std::min<size_t>(call_bytes, src.size() - offset));
  }
  return now_ns() - start_ns;
}

int64_t copy_pages(std::span<std::byte> dst, std::span<const std::byte> src, std::span<const int64_t> dst_pages,
                   std::span<const int64_t> src_pages, uint64_t page_bytes) {
  check_not_zero("page_bytes", page_bytes);
  check_same_count(dst_pages, src_pages);
  check_pages("dst_pages", dst_pages, page_bytes, dst.size());
  check_pages("src_pages", src_pages, page_bytes, src.size());
  const int64_t start_ns = now_ns();
  for (size_t i = 0; i < dst_pages.size(); ++i) {
    glibc_memcpy(dst.data() + static_cast<uint64_t>(dst_pages[i]) * page_bytes,
                 src.data() + static_cast<uint64_t>(src_pages[i]) * page_bytes, page_bytes);
  }
  return now_ns() - start_ns;
}

int64_t fill_work_requests(std::span<const int64_t> dst_pages, std::span<const int64_t> src_pages, uint64_t page_bytes,
                           uint64_t rounds) {
  check_same_count(dst_pages, src_pages);
  std::vector<BareWorkRequest> ring(kRingSlots);
  const int64_t start_ns = now_ns();
  for (uint64_t round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < dst_pages.size(); ++i) {
      BareWorkRequest& request = ring[i % kRingSlots];
      request.id = i;
      request.next = (i + 1) % kRingSlots;
      request.local_address = (1ull << 40) + static_cast<uint64_t>(src_pages[i]) * page_bytes;
      request.remote_address = (1ull << 41) + static_cast<uint64_t>(dst_pages[i]) * page_bytes;
      request.length_bytes = static_cast<uint32_t>(page_bytes);
      request.local_key = 1;
      request.remote_key = 2;
      request.imm = 3;
      request.opcode = 4;
      request.flags = 5;
    }
    // Makes the compiler assume that somebody reads the ring between two rounds, as a NIC would.
    asm volatile("" : : "r"(ring.data()) : "memory");
  }
  return now_ns() - start_ns;
}

int64_t flag_ping_pong(std::span<std::byte> page, bool first, uint64_t start, uint64_t rounds, Guard& guard) {
  // Further apart than the pair of lines that some prefetchers fetch together.
  constexpr size_t kApartBytes = 4 * kCacheLineBytes;
  if (page.size() < kApartBytes + kCacheLineBytes) throw UsageError("page is shorter than five cache lines");
  auto* words = reinterpret_cast<std::atomic<uint64_t>*>(page.data());
  constexpr size_t kWordsApart = kApartBytes / sizeof(uint64_t);
  std::atomic<uint64_t>& mine = words[first ? 0 : kWordsApart];
  std::atomic<uint64_t>& theirs = words[first ? kWordsApart : 0];
  const int64_t start_ns = now_ns();
  for (uint64_t value = start + 1; value <= start + rounds; ++value) {
    // release/acquire: what a real flag needs so that earlier data is visible; free on x86.
    if (first) mine.store(value, std::memory_order_release);
    while (theirs.load(std::memory_order_acquire) != value) guard.tick();
    if (!first) mine.store(value, std::memory_order_release);
  }
  return now_ns() - start_ns;
}

void pass_gate(std::span<std::byte> page, uint32_t due, bool sleeps, Guard& guard) {
  constexpr int64_t kSleepNs = 50'000'000;  // how often the guard is asked
  if (page.size() < sizeof(uint32_t)) throw UsageError("the page is too short");
  auto* arrived = reinterpret_cast<std::atomic<uint32_t>*>(page.data());
  // relaxed, like the loads: nothing is read behind it.
  const uint32_t count = arrived->fetch_add(1, std::memory_order_relaxed) + 1;
  if (count == due && sleeps) futex_wake_all(arrived, FutexScope::kShared);
  for (uint32_t seen = count; static_cast<int32_t>(seen - due) < 0; seen = arrived->load(std::memory_order_relaxed)) {
    if (!sleeps) {
      guard.tick();
      continue;
    }
    futex_wait(arrived, seen, now_ns() + kSleepNs, FutexScope::kShared);
    guard.look();
  }
}

void spin_on_word(std::span<std::byte> word, std::span<int64_t> seen_ns, Guard& guard) {
  if (word.size() != sizeof(uint64_t)) throw UsageError("the word must have 8 bytes");
  const auto* counted = reinterpret_cast<const std::atomic<uint64_t>*>(word.data());
  for (size_t i = 0; i < seen_ns.size(); ++i) {
    // acquire: as a sender that needs to see what was written before.
    while (counted->load(std::memory_order_acquire) <= i) guard.tick();
    seen_ns[i] = now_ns();
  }
}

int64_t slot_stream(std::span<std::byte> memory, bool producer, uint64_t start, uint64_t count, Guard& guard) {
  if (memory.size() < kStreamBytes) throw UsageError("memory is shorter than kStreamBytes");
  auto* slots = reinterpret_cast<StreamSlot*>(memory.data());
  auto* consumed = reinterpret_cast<std::atomic<uint64_t>*>(slots + kStreamSlots);
  const uint64_t end = start + count;
  uint64_t taken = start;
  const int64_t start_ns = now_ns();
  for (uint64_t n = start + 1; n <= end; ++n) {
    StreamSlot& slot = slots[n % kStreamSlots];
    if (producer) {
      // acquire: pairs with the consumer's release: it has read the slot before we fill it again.
      while (n > taken + kStreamSlots) {
        taken = consumed->load(std::memory_order_acquire);
        guard.tick();
      }
      slot.payload = n;
      slot.number.store(n, std::memory_order_release);  // pairs with the consumer's acquire: payload before number
    } else {
      while (slot.number.load(std::memory_order_acquire) != n) guard.tick();
      if (slot.payload != n) throw TransportError("bench", 0, "the bare ring lost a record");
      if (n % kStreamReport == 0 || n == end) consumed->store(n, std::memory_order_release);
    }
  }
  while (producer && consumed->load(std::memory_order_acquire) != end) guard.tick();
  return now_ns() - start_ns;
}

}  // namespace crossrail::bench
