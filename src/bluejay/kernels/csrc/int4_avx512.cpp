// AVX-512: fp32 products on 16 lanes, two blocks at a time. A code becomes a float by one table look-up, which ignores
// all but the low four bits of its index.
#include "int4_paths.h"

namespace {

struct Products {
  template <int B, int M>
  static void kernel(const Weights& w, int64_t block, int64_t first, int64_t last, const uint32_t* packed,
                     const Segment* segments, float* totals, const Ahead&) {
    const auto* x = reinterpret_cast<const float*>(packed);
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int64_t s = first; s < last; ++s) {
      __m512 sums[B][M];
      for (auto& row : sums)
        for (auto& sum : row) sum = _mm512_setzero_ps();
      for (int64_t c = s * w.segment_chunks; c < end_of(w, s); ++c) {
        __m512i codes[B];
        for (int b = 0; b < B; ++b) codes[b] = _mm512_loadu_si512(w.codes + ((block + b) * w.chunks + c) * kOutputs);
#pragma GCC unroll 8
        for (int k = 0; k < 8; ++k) {
          const int shift = 16 * (k & 1) + 4 * (k >> 1);
          __m512 code[B];
          for (int b = 0; b < B; ++b) code[b] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes[b], shift), table);
#pragma GCC unroll 8
          for (int m = 0; m < M; ++m) {
            const __m512 value = _mm512_set1_ps(x[(c * 8 + k) * M + m]);
            for (int b = 0; b < B; ++b) sums[b][m] = _mm512_fmadd_ps(code[b], value, sums[b][m]);
          }
        }
      }
#pragma GCC unroll 2
      for (int b = 0; b < B; ++b) {
        const int64_t group = group_of(w, block + b, s);
        const auto at = [&](const uint16_t* part) {
          return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(part + group)));
        };
        const __m512 scale = at(w.scales), bias = at(w.biases);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          float* total = totals + (b * M + m) * kOutputs;
          const __m512 value = _mm512_fmadd_ps(scale, sums[b][m], _mm512_loadu_ps(total));
          _mm512_storeu_ps(total, _mm512_fmadd_ps(bias, _mm512_set1_ps(segments[s * M + m].sum), value));
        }
      }
    }
  }
};

}  // namespace

const Path int4_avx512 = {"avx512", 8, 2, 8, pack_floats, run_path<Products, 2, 8>};
