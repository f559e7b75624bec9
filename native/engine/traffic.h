// What was sent to a peer over each rail, and how long it took: for metrics.
//
// Threads: the progress holder writes, anybody may read at any time; each number is exact on its own.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdint>

namespace crossrail {

// Counters written by the progress holder and read by any thread. release: whoever sees a count sees all counts bumped
// before it.
inline void bump(std::atomic<uint64_t>& counter, uint64_t by = 1) {
  counter.store(counter.load(std::memory_order_relaxed) + by, std::memory_order_release);
}

// Durations by powers of two: bucket 0 holds those below 2^kLatencyFirstBits ns, each further bucket reaches twice as
// far, and the last holds the rest.
inline constexpr uint32_t kLatencyFirstBits = 8;
inline constexpr uint32_t kLatencyBuckets = 28;  // the last but one ends at 2^34 ns, 17 s

constexpr uint32_t latency_bucket(int64_t ns) {
  const auto bits = static_cast<uint32_t>(std::bit_width(static_cast<uint64_t>(std::max<int64_t>(ns, 0))));
  return bits <= kLatencyFirstBits ? 0 : std::min(bits - kLatencyFirstBits, kLatencyBuckets - 1);
}
static_assert(latency_bucket(-1) == 0 && latency_bucket(255) == 0 && latency_bucket(256) == 1);
static_assert(latency_bucket(int64_t{1} << 62) == kLatencyBuckets - 1);

// One rail towards one peer.
struct alignas(64) RailTraffic {
  std::atomic<uint64_t> works{0};  // put on the rail; a retransmission counts again
  std::atomic<uint64_t> bytes{0};
  std::atomic<uint64_t> imms{0};    // works with an immediate
  std::atomic<uint64_t> broken{0};  // connections or paths that broke
  std::atomic<uint64_t> again{0};   // works that were on one of these and are sent again, on any rail
  // For timed works: from the hand-over to the transport until they ended.
  std::atomic<uint64_t> latency_sum_ns{0};
  std::array<std::atomic<uint64_t>, kLatencyBuckets> latencies{};

  void count(uint32_t more_works, uint64_t more_bytes, uint32_t more_imms) {
    bump(works, more_works);
    bump(bytes, more_bytes);
    if (more_imms != 0) bump(imms, more_imms);
  }
  // Whether to time the next post, in case it completes at once: only a few short ones, since reading the clock twice
  // takes as long as posting a short write; always for long works, where it does not show.
  bool times_next(uint64_t post_works, uint64_t post_bytes) const {
    constexpr uint64_t kWritesPerSample = 256, kPagesPerSample = 16384, kLongBytes = 256 << 10;  // powers of two
    const uint64_t mask = (post_works == 1 ? kWritesPerSample : kPagesPerSample) - 1;
    return (works.load(std::memory_order_relaxed) & mask) < post_works || post_bytes >= post_works * kLongBytes;
  }
  void note_latency(int64_t ns) {
    bump(latency_sum_ns, static_cast<uint64_t>(std::max<int64_t>(ns, 0)));
    bump(latencies[latency_bucket(ns)]);
  }
};

// A plain copy of the counters; also holds sums of several.
struct RailCounts {
  uint64_t works = 0, bytes = 0, imms = 0, broken = 0, again = 0, latency_sum_ns = 0;
  std::array<uint64_t, kLatencyBuckets> latencies{};

  void add(const RailTraffic& more) {
    const auto get = [](const std::atomic<uint64_t>& counter) { return counter.load(std::memory_order_relaxed); };
    works += get(more.works);
    bytes += get(more.bytes);
    imms += get(more.imms);
    broken += get(more.broken);
    again += get(more.again);
    latency_sum_ns += get(more.latency_sum_ns);
    for (uint32_t i = 0; i < kLatencyBuckets; ++i) latencies[i] += get(more.latencies[i]);
  }
};

}  // namespace crossrail
