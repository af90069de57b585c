// AVX2: fp32 products on 8 lanes, one block at a time.
#include "int4_paths.h"

namespace {

struct Products {
  template <int B, int M>
  static void kernel(const Weights& w, int64_t block, int64_t first, int64_t last, const uint32_t* packed,
                     const Segment* segments, float* totals, const Ahead&) {
    const auto* x = reinterpret_cast<const float*>(packed);
    const __m256i digit = _mm256_set1_epi32(15);
    for (int64_t s = first; s < last; ++s) {
      __m256 sums[M][2];
      for (auto& row : sums) row[0] = row[1] = _mm256_setzero_ps();
      for (int64_t c = s * w.segment_chunks; c < end_of(w, s); ++c) {
        const auto* codes = reinterpret_cast<const __m256i*>(w.codes + (block * w.chunks + c) * kOutputs);
        const __m256i low = _mm256_loadu_si256(codes), high = _mm256_loadu_si256(codes + 1);
#pragma GCC unroll 8
        for (int k = 0; k < 8; ++k) {
          const int shift = 16 * (k & 1) + 4 * (k >> 1);
          const __m256 a = _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(low, shift), digit));
          const __m256 b = _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(high, shift), digit));
#pragma GCC unroll 6
          for (int m = 0; m < M; ++m) {
            const __m256 value = _mm256_broadcast_ss(x + (c * 8 + k) * M + m);
            sums[m][0] = _mm256_fmadd_ps(a, value, sums[m][0]);
            sums[m][1] = _mm256_fmadd_ps(b, value, sums[m][1]);
          }
        }
      }
      const int64_t group = group_of(w, block, s);
      for (int half = 0; half < 2; ++half) {
        const auto at = [&](const uint16_t* table) {
          return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table + group) + half));
        };
        const __m256 scale = at(w.scales), bias = at(w.biases);
#pragma GCC unroll 6
        for (int m = 0; m < M; ++m) {
          float* total = totals + m * kOutputs + 8 * half;
          __m256 value = _mm256_fmadd_ps(scale, sums[m][half], _mm256_loadu_ps(total));
          value = _mm256_fmadd_ps(bias, _mm256_set1_ps(segments[s * M + m].sum), value);
          _mm256_storeu_ps(total, value);
        }
      }
    }
  }
};

}  // namespace

const Path int4_avx2 = {"avx2", 6, 1, 8, pack_floats, run_path<Products, 1, 6>};
