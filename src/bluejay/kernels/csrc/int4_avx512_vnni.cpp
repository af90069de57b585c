// AVX-512 with VNNI, for bfloat16 x: integer dot products of codes and 12-bit x, three instructions for 16 outputs x 8
// inputs x 1 row where bf16 products take four; or of 8-bit x, two instructions.
#include "int4_integers.h"

namespace {

template <bool kFine>
void pack(const Weights& w, const float* x, int64_t rows, int64_t first, int64_t last, uint32_t* packed,
          Segment* segments) {
  const int64_t start = first * w.segment_chunks, chunks = end_of(w, last - 1) - start;
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t s = first; s < last; ++s) {
      const int64_t begin = s * w.segment_chunks;
      uint32_t* to = packed + (begin * rows + m) * kParts<kFine>;
      segments[s * rows + m] =
          pack_segment<kFine>(x + (m * chunks + begin - start) * 8, end_of(w, s) - begin,
                       [&](int64_t c, int part) -> uint32_t& { return to[c * rows * kParts<kFine> + part]; });
    }
}

// sum += codes . x, four products to a lane. Written out so that the compiler keeps the order, and with it the sums in
// registers.
inline void add(__m512i& sum, __m512i codes, __m512i x) {
  asm volatile("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(x));
}

// The dot products of a segment in its steps, plus `start`. Few rows: each vector of codes is read once, and its
// products go to different sums, so that none waits for another.
template <bool kFine, int B, int M>
void dot_few(const char* codes, int64_t chunks, const int32_t* words, const Segment* segments, Prefetch<B> prefetch,
             __m512i (&sums)[B][M]) {
  const __m512i digits = _mm512_set1_epi8(15);
  __m512i low[B][M], high[B][M], fine[B][M];
  for (int b = 0; b < B; ++b)
    for (int m = 0; m < M; ++m) {
      low[b][m] = high[b][m] = _mm512_setzero_si512();
      fine[b][m] = _mm512_set1_epi32(segments[m].start);
    }
  for (int64_t c = 0; c < chunks; ++c, words += kParts<kFine> * M) {
    prefetch(c);
#pragma GCC unroll 2
    for (int b = 0; b < B; ++b) {
      const __m512i raw = _mm512_loadu_si512(codes + b * prefetch.length + c * 64);
      const __m512i low_digits = _mm512_and_si512(raw, digits);
      const __m512i high_digits = _mm512_and_si512(_mm512_srli_epi32(raw, 4), digits);
#pragma GCC unroll 2
      for (int m = 0; m < M; ++m) {
        const int32_t* x = words + kParts<kFine> * m;
        add(low[b][m], low_digits, _mm512_set1_epi32(x[0]));
        add(high[b][m], high_digits, _mm512_set1_epi32(x[1]));
        if constexpr (kFine) add(fine[b][m], raw, _mm512_set1_epi32(x[2]));
      }
    }
  }
  for (int b = 0; b < B; ++b)
    for (int m = 0; m < M; ++m) {
      const __m512i coarse = _mm512_add_epi32(low[b][m], high[b][m]);
      sums[b][m] = kFine ? of_coarse_and_fine(coarse, fine[b][m]) : _mm512_add_epi32(coarse, fine[b][m]);
    }
}

// The same for more rows: the coarse bytes of the whole segment come first, and the fine ones are added to their sum,
// shifted. One register is enough for each block and row, and eight rows of two blocks have room.
template <bool kFine, int B, int M>
void dot_many(const char* codes, int64_t chunks, const int32_t* words, const Segment* segments, Prefetch<B> prefetch,
              __m512i (&sums)[B][M]) {
  const __m512i digits = _mm512_set1_epi8(15);
  for (auto& block : sums)
    for (int m = 0; m < M; ++m) block[m] = kFine ? _mm512_setzero_si512() : _mm512_set1_epi32(segments[m].start);
  for (int64_t c = 0; c < chunks; ++c) {
    prefetch(c);
    __m512i low[B], high[B];
#pragma GCC unroll 2
    for (int b = 0; b < B; ++b) {
      const __m512i raw = _mm512_loadu_si512(codes + b * prefetch.length + c * 64);
      low[b] = _mm512_and_si512(raw, digits);
      high[b] = _mm512_and_si512(_mm512_srli_epi32(raw, 4), digits);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const __m512i q = _mm512_set1_epi32(words[(c * M + m) * kParts<kFine>]);
#pragma GCC unroll 2
      for (int b = 0; b < B; ++b) add(sums[b][m], low[b], q);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const __m512i r = _mm512_set1_epi32(words[(c * M + m) * kParts<kFine> + 1]);
#pragma GCC unroll 2
      for (int b = 0; b < B; ++b) add(sums[b][m], high[b], r);
    }
  }
  if constexpr (!kFine) return;
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int b = 0; b < B; ++b) sums[b][m] = of_coarse_and_fine(sums[b][m], _mm512_set1_epi32(segments[m].start));
  for (int64_t c = 0; c < chunks; ++c) {
    __m512i raw[B];
#pragma GCC unroll 2
    for (int b = 0; b < B; ++b) raw[b] = _mm512_loadu_si512(codes + b * prefetch.length + c * 64);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const __m512i p = _mm512_set1_epi32(words[(c * M + m) * kParts<kFine> + 2]);
#pragma GCC unroll 2
      for (int b = 0; b < B; ++b) add(sums[b][m], raw[b], p);
    }
  }
}

template <bool kFine>
struct Products {
  template <int B, int M>
  static void kernel(const Weights& w, int64_t block, int64_t first, int64_t last, const uint32_t* x,
                     const Segment* segments, float* totals, const Ahead& ahead) {
    const int64_t length = w.chunks * 64;
    for (int64_t s = first; s < last; ++s) {
      asm volatile("" ::: "memory");  // totals stay in memory: there are no registers for them beside the sums
      const int64_t begin = s * w.segment_chunks, chunks = end_of(w, s) - begin;
      const auto* words = reinterpret_cast<const int32_t*>(x + begin * M * kParts<kFine>);
      const char* codes = reinterpret_cast<const char*>(w.codes) + block * length + begin * 64;
      const Prefetch<B> prefetch{codes_ahead(w, ahead, s, first), length, ahead.part, ahead.parts};
      if (ahead.part == 0)
        for (int b = 0; b < B; ++b) prefetch_scales(w, ahead, b, s, first);
      __m512i sums[B][M];
      if constexpr (M <= 2) dot_few<kFine, B, M>(codes, chunks, words, segments + s * M, prefetch, sums);
      else dot_many<kFine, B, M>(codes, chunks, words, segments + s * M, prefetch, sums);
#pragma GCC unroll 2
      for (int b = 0; b < B; ++b) {
        const int64_t group = group_of(w, block + b, s);
        const __m512 scale = read_halves(w.scales + group), bias = read_halves(w.biases + group);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m)
          scale_and_add(totals + (b * M + m) * kOutputs, sums[b][m], segments[s * M + m], scale, bias);
      }
    }
  }
};

}  // namespace

const Path int4_avx512_vnni = {"avx512", 8, 2, 3, pack<true>, run_path<Products<true>, 2, 8>};
const Path int4_avx512_vnni_x8 = {"x8", 8, 2, 2, pack<false>, run_path<Products<false>, 2, 8>};
