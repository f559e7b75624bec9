#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "moe/floats.h"
#include "moe/simd/row_ops.h"
#include "moe/simd/target.h"

CROSSRAIL_TARGET_BEGIN("avx2,f16c")

#include "moe/simd/row_loops.h"

namespace crossrail::moe {
namespace {

struct Avx2 {
  static constexpr size_t kWidth = 8;
  using Floats = __m256;
  using Words = __m256i;

  static Floats zero() { return _mm256_setzero_ps(); }
  static Floats set(float value) { return _mm256_set1_ps(value); }
  static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
  static Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }

  template <Float F>
  static Floats load(const void* row, size_t i) {
    if constexpr (F == Float::kFloat32) return _mm256_loadu_ps(static_cast<const float*>(row) + i);
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(row) + i));
    if constexpr (F == Float::kFloat16) return _mm256_cvtph_ps(halves);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }
  template <Float F>
  static void store(void* row, size_t i, Floats values) {
    if constexpr (F == Float::kFloat32) {
      _mm256_storeu_ps(static_cast<float*>(row) + i, values);
      return;
    }
    __m128i halves;
    if constexpr (F == Float::kFloat16) {
      halves = _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    } else {
      const __m256i bits = _mm256_castps_si256(values);
      const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
      const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
      const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
      const __m256i words = _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), _mm256_set1_epi32(0x7FC0), nan);
      halves = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<uint16_t*>(row) + i), halves);
  }

  static Words magnitudes(Floats values) {
    return _mm256_and_si256(_mm256_castps_si256(values), _mm256_set1_epi32(0x7FFFFFFF));
  }
  static Words greater(Words a, Words b) { return _mm256_max_epu32(a, b); }
  static uint32_t largest(Words words) {
    __m128i most = _mm_max_epu32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0x4E));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0xB1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(most));
  }

  // See Avx512::store_e4m3.
  static void store_e4m3(uint8_t* codes, Floats values) {
    const __m256i all = _mm256_castps_si256(values);
    const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(all, 24), _mm256_set1_epi32(0x80));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    const __m256i bits = _mm256_min_epu32(magnitudes(values), _mm256_set1_epi32(0x43E00000));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 20), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFFF)), odd);
    const __m256i normal = _mm256_sub_epi32(_mm256_srli_epi32(rounded, 20), _mm256_set1_epi32(120 << 3));
    const __m256 stepped = _mm256_add_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(16384));
    const __m256i subnormal = _mm256_sub_epi32(_mm256_castps_si256(stepped), _mm256_set1_epi32(0x46800000));
    const __m256i small = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x3C800000), bits);
    __m256i code = _mm256_blendv_epi8(normal, subnormal, small);
    code = _mm256_or_si256(_mm256_blendv_epi8(code, _mm256_set1_epi32(0x7F), nan), sign);
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(codes), _mm_packus_epi16(words, words));
  }
};

}  // namespace

constinit const RowOps kAvx2RowOps = make_row_ops<Avx2>("avx2");

}  // namespace crossrail::moe

CROSSRAIL_TARGET_END

#endif
