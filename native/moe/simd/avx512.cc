// AVX-512F only, without its bfloat16 instructions, which treat subnormals as zero.
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

CROSSRAIL_TARGET_BEGIN("avx512f")

#include "moe/simd/row_loops.h"

namespace crossrail::moe {
namespace {

struct Avx512 {
  static constexpr size_t kWidth = 16;
  using Floats = __m512;
  using Words = __m512i;

  static Floats zero() { return _mm512_setzero_ps(); }
  static Floats set(float value) { return _mm512_set1_ps(value); }
  static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }

  template <Float F>
  static Floats load(const void* row, size_t i) {
    if constexpr (F == Float::kFloat32) return _mm512_loadu_ps(static_cast<const float*>(row) + i);
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(row) + i));
    if constexpr (F == Float::kFloat16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }
  template <Float F>
  static void store(void* row, size_t i, Floats values) {
    if constexpr (F == Float::kFloat32) {
      _mm512_storeu_ps(static_cast<float*>(row) + i, values);
      return;
    }
    __m256i halves;
    if constexpr (F == Float::kFloat16) {
      halves = _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    } else {
      const __m512i bits = _mm512_castps_si512(values);
      const __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
      const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
      const __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
      halves =
          _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), nan, _mm512_set1_epi32(0x7FC0)));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<uint16_t*>(row) + i), halves);
  }

  static Words magnitudes(Floats values) {
    return _mm512_and_epi32(_mm512_castps_si512(values), _mm512_set1_epi32(0x7FFFFFFF));
  }
  static Words greater(Words a, Words b) { return _mm512_max_epu32(a, b); }
  static uint32_t largest(Words words) { return _mm512_reduce_max_epu32(words); }

  // Like to_e4m3, in lanes: normal numbers by rounding off 20 bits of the fraction; below 2**-6 by adding 2**14, where
  // float32 has the same steps as e4m3 there, 2**-9.
  static void store_e4m3(uint8_t* codes, Floats values) {
    const __m512i all = _mm512_castps_si512(values);
    const __m512i sign = _mm512_and_epi32(_mm512_srli_epi32(all, 24), _mm512_set1_epi32(0x80));
    const __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    const __m512i bits = _mm512_min_epu32(magnitudes(values), _mm512_set1_epi32(0x43E00000));
    const __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(bits, 20), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFFF)), odd);
    __m512i code = _mm512_sub_epi32(_mm512_srli_epi32(rounded, 20), _mm512_set1_epi32(120 << 3));
    const __mmask16 small = _mm512_cmplt_epu32_mask(bits, _mm512_set1_epi32(0x3C800000));
    const __m512 stepped = _mm512_add_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(16384));
    code = _mm512_mask_sub_epi32(code, small, _mm512_castps_si512(stepped), _mm512_set1_epi32(0x46800000));
    code = _mm512_mask_mov_epi32(code, nan, _mm512_set1_epi32(0x7F));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm512_cvtepi32_epi8(_mm512_or_epi32(code, sign)));
  }
};

}  // namespace

constinit const RowOps kAvx512RowOps = make_row_ops<Avx512>("avx512");

}  // namespace crossrail::moe

CROSSRAIL_TARGET_END

#endif
