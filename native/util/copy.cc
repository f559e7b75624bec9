#include "util/copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace crossrail {

#if defined(__x86_64__)

namespace {

constexpr size_t kLine = 64;

// From this size on, C libraries may copy with `rep movsb` (glibc 2.36 does, its bug 30994).
constexpr size_t kStringMoveMin = 2048;

// At least one line. A line is loaded completely before it is stored: otherwise a compiler may recognise memcpy and
// replace the loop.
void copy_lines(uint8_t* target, const uint8_t* source, size_t bytes) {
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(target) % kLine) % kLine;
  std::memcpy(target, source, head);
  size_t at = head;
  for (; bytes - at >= kLine; at += kLine) {
    const auto* from = reinterpret_cast<const __m128i*>(source + at);
    auto* to = reinterpret_cast<__m128i*>(target + at);
    const __m128i a = _mm_loadu_si128(from);
    const __m128i b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2);
    const __m128i d = _mm_loadu_si128(from + 3);
    _mm_store_si128(to, a);
    _mm_store_si128(to + 1, b);
    _mm_store_si128(to + 2, c);
    _mm_store_si128(to + 3, d);
  }
  std::memcpy(target + at, source + at, bytes - at);
}
// How far ahead of the loads we prefetch: across page borders, where the processor's own prefetcher stops, and early
// enough for a TLB miss. Measured: half a page is worse than none. For shorter copies, as far as the next copy.
constexpr size_t kPrefetchAhead = 8192;

// The cache level that the source is prefetched into, though nobody needs it there later. On Intel, each line
// prefetched into L1, non-temporal or not, takes one of the few buffers through which streaming stores leave the core:
// 4.6 GB/s that way, 11 through L2, memcpy 6 (Xeon with 300 MiB of L3). On an EPYC it is the other way round, by a few
// percent.
enum class Into { kNearest, kSecond };

template <Into kInto>
inline void prefetch(const uint8_t* at) {
  _mm_prefetch(reinterpret_cast<const char*>(at), kInto == Into::kSecond ? _MM_HINT_T1 : _MM_HINT_NTA);
}

// Copies whole lines, and prefetches as many from `ahead` on. No branch in the loop: with a choice between two places
// to prefetch from, pages of 1 KiB were hardly faster than without prefetching.
template <Into kInto>
__attribute__((target("avx512f"))) void stream_lines_avx512(uint8_t* target, const uint8_t* source, size_t bytes,
                                                            const uint8_t* ahead) {
  for (size_t i = 0; i < bytes; i += kLine) {
    prefetch<kInto>(ahead + i);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + i), _mm512_loadu_si512(source + i));
  }
}

template <Into kInto>
__attribute__((target("avx2"))) void stream_lines_avx2(uint8_t* target, const uint8_t* source, size_t bytes,
                                                       const uint8_t* ahead) {
  for (size_t i = 0; i < bytes; i += kLine) {
    prefetch<kInto>(ahead + i);
    const auto* from = reinterpret_cast<const __m256i*>(source + i);
    auto* to = reinterpret_cast<__m256i*>(target + i);
    const __m256i a = _mm256_loadu_si256(from);
    const __m256i b = _mm256_loadu_si256(from + 1);
    _mm256_stream_si256(to, a);
    _mm256_stream_si256(to + 1, b);
  }
}

template <Into kInto>
void stream_lines_sse2(uint8_t* target, const uint8_t* source, size_t bytes, const uint8_t* ahead) {
  for (size_t i = 0; i < bytes; i += kLine) {
    prefetch<kInto>(ahead + i);
    for (size_t j = 0; j < kLine; j += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(target + i + j),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i + j)));
    }
  }
}

using StreamLines = void (*)(uint8_t*, const uint8_t*, size_t, const uint8_t*);

template <Into kInto>
StreamLines widest_stream_lines() {
  if (__builtin_cpu_supports("avx512f")) return stream_lines_avx512<kInto>;
  if (__builtin_cpu_supports("avx2")) return stream_lines_avx2<kInto>;
  return stream_lines_sse2<kInto>;
}

StreamLines choose_stream_lines() {
  return __builtin_cpu_is("intel") ? widest_stream_lines<Into::kSecond>() : widest_stream_lines<Into::kNearest>();
}

const StreamLines stream_lines = choose_stream_lines();

}  // namespace

void copy_cached(void* target, const void* source, size_t bytes) {
  auto* to = static_cast<uint8_t*>(target);
  const auto* from = static_cast<const uint8_t*>(source);
  const bool overlaps = static_cast<size_t>(to - from) < bytes;
  if (bytes >= kStringMoveMin && lies_behind(to, from) && !overlaps) {
    copy_lines(to, from, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

void copy_streaming(void* target, const void* source, size_t bytes, const void* next_source, size_t next_bytes) {
  auto* to = static_cast<uint8_t*>(target);
  const auto* from = static_cast<const uint8_t*>(source);
  // Streaming stores need whole, aligned lines: the unaligned ends go through the caches.
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
  if (bytes < head + 4 * kLine) {
    std::memcpy(to, from, bytes);
    return;
  }
  const size_t body = (bytes - head) / kLine * kLine;
  const size_t distance = std::min(kPrefetchAhead, body);
  std::memcpy(to, from, head);
  to += head;
  from += head;
  stream_lines(to, from, body - distance, from + distance);
  const uint8_t* last = from + body - distance;
  const bool has_next = next_bytes >= distance;  // else prefetches once more what is already near
  stream_lines(to + body - distance, last, distance, has_next ? static_cast<const uint8_t*>(next_source) : last);
  std::memcpy(to + body, from + body, bytes - head - body);
}

void copy_fence() { _mm_sfence(); }

#else

void copy_cached(void* target, const void* source, size_t bytes) { std::memcpy(target, source, bytes); }

void copy_streaming(void* target, const void* source, size_t bytes, const void*, size_t) {
  std::memcpy(target, source, bytes);
}

void copy_fence() {}

#endif

}  // namespace crossrail
