// Integer dot products of codes and x, for bfloat16 x: what the paths that compute them share. Their sums are exact and
// they scale them in one order, so that they give the same bits. x has 12 bits (kFine), or 8 where that was asked for.
//
// 12 bits: within a segment x is a multiple of step = max|x| / 118 / 256, rounded to 16 steps: about an eighth of what
// bf16 itself rounds a value near max|x| to. A byte of codes holds two, A in its low half and B in its high half, so
// that the instruction has three operands without further work: A, B, and the byte itself, R = A + 16 B. With bytes
// q, r, p
//
//     A q + B r + R p / 256  =  A (q + p / 256) + B (r + p / 16)
//
// and p = 16 a + b carries the low halves of both: `a` for the x of A, b for the x of B; what p adds to either beyond
// its own low half is taken out of q and r. Sums of 256 products fit 32 bits and are exact.
//
// 8 bits: A q + B r alone, with step = max|x| / 127.
//
// The rounding errors of a segment meet the code's mean in full. Their sum is known, so 7.5 times it is put right where
// the dot product starts, and only the part that varies with the code remains.
#pragma once

#include "int4_paths.h"

namespace {

template <bool kFine>
constexpr float kLargest = kFine ? 118 : 127;  // of q and r; with what p adds, 127 at most
constexpr float kSmallest = 0x1p-100f;  // below it x counts as 0 and only its sum with the group's bias is kept

template <bool kFine>
constexpr int kParts = kFine ? 3 : 2;

// One segment of one row, `chunks` chunks at `x`: q, r and p of chunk c go to the words place(c, 0), (c, 1) and (c, 2).
template <bool kFine, class Place>
Segment pack_segment(const float* x, int64_t chunks, const Place& place) {
  __m512i bits = _mm512_setzero_si512();
  __m512 sums = _mm512_setzero_ps();
  for (int64_t k = 0; k < chunks * 8; k += 16) {
    const __mmask16 mask = chunks * 8 - k < 16 ? 0xff : 0xffff;
    const __m512 value = _mm512_maskz_loadu_ps(mask, x + k);
    sums = _mm512_add_ps(sums, value);
    bits = _mm512_max_epu32(bits, _mm512_castps_si512(_mm512_abs_ps(value)));
  }
  const float sum = _mm512_reduce_add_ps(sums);
  const uint32_t largest = _mm512_reduce_max_epu32(bits);
  const bool is_finite = largest < 0x7f800000u, is_zero = from_bits(largest) < kSmallest;
  const float unit = is_finite && !is_zero ? from_bits(largest) / kLargest<kFine> : 0;
  const __m512 inverse = _mm512_set1_ps(unit > 0 ? 1 / unit : 0);

  // x of the A and the B of each byte, four chunks at a time.
  const __m512i of_a = _mm512_setr_epi32(0, 4, 1, 5, 8, 12, 9, 13, 16, 20, 17, 21, 24, 28, 25, 29);
  const __m512i of_b = _mm512_setr_epi32(2, 6, 3, 7, 10, 14, 11, 15, 18, 22, 19, 23, 26, 30, 27, 31);
  const __m512i low = _mm512_set1_epi32(15), eight = _mm512_set1_epi32(8);
  __m512i units = _mm512_setzero_si512();
  for (int64_t c = 0; c < chunks; c += 4) {
    const int64_t left = chunks - c;
    const auto load = [&](int64_t from) {
      const __mmask16 mask = left > from + 1 ? 0xffff : left > from ? 0xff : 0;
      return _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + (c + from) * 8), inverse);
    };
    const __m512 first = load(0), second = load(2);
    const __m512 xa = _mm512_permutex2var_ps(first, of_a, second), xb = _mm512_permutex2var_ps(first, of_b, second);
    __m512i q, r, p = _mm512_setzero_si512();
    if constexpr (kFine) {
      const __m512 sixteen = _mm512_set1_ps(16);
      const __m512i sixteenths_b = _mm512_cvtps_epi32(_mm512_mul_ps(xb, sixteen));
      const __m512i b = _mm512_and_si512(sixteenths_b, low);
      const __m512 rest =
          _mm512_fnmadd_ps(_mm512_cvtepi32_ps(b), _mm512_set1_ps(1.0f / 16), _mm512_mul_ps(xa, sixteen));
      const __m512i sixteenths_a = _mm512_cvtps_epi32(rest);
      const __m512i a = _mm512_sub_epi32(_mm512_and_si512(_mm512_add_epi32(sixteenths_a, eight), low), eight);
      q = _mm512_srai_epi32(_mm512_sub_epi32(sixteenths_a, a), 4);
      r = _mm512_sub_epi32(_mm512_srai_epi32(sixteenths_b, 4), a);
      p = _mm512_add_epi32(_mm512_slli_epi32(a, 4), b);
      // What q, r and p stand for: 256 q + p and 256 r + 16 p.
      units = _mm512_add_epi32(units, _mm512_slli_epi32(_mm512_add_epi32(q, r), 8));
      units = _mm512_add_epi32(units, _mm512_add_epi32(p, _mm512_slli_epi32(p, 4)));
    } else {
      q = _mm512_cvtps_epi32(xa), r = _mm512_cvtps_epi32(xb);
      units = _mm512_add_epi32(units, _mm512_add_epi32(q, r));
    }
    const __m128i words[3] = {_mm512_cvtepi32_epi8(q), _mm512_cvtepi32_epi8(r), _mm512_cvtepi32_epi8(p)};
    for (int part = 0; part < kParts<kFine>; ++part) {
      place(c, part) = _mm_extract_epi32(words[part], 0);
      if (left > 1) place(c + 1, part) = _mm_extract_epi32(words[part], 1);
      if (left > 2) place(c + 2, part) = _mm_extract_epi32(words[part], 2);
      if (left > 3) place(c + 3, part) = _mm_extract_epi32(words[part], 3);
    }
  }
  if (!is_finite) return {sum, __builtin_nanf(""), 0};
  const float step = kFine ? unit / 256 : unit;
  // At most 8 units an input; more, or NaN, where the sum of finite x is not finite: then y is not either.
  const double lost = step > 0 ? double(sum) / step - _mm512_reduce_add_epi32(units) : 0;
  return {sum, step, __builtin_fabs(lost) < 64 * chunks + 64 ? int32_t(__builtin_lrint(7.5 * lost)) : 0};
}

// What comes from memory next for a segment, one vector of each of B blocks at a time, when it is this tile's turn.
template <int B>
struct Prefetch {
  const char* next;
  int64_t length, turn, parts;

  void operator()(int64_t c) {
    if (turn-- != 0) return;
    turn = parts - 1;
    for (int b = 0; b < B; ++b) _mm_prefetch(next + b * length + c * 64, _MM_HINT_NTA);
  }
};

// The scales and biases that are as far into the next pass as segment `s` is into this one.
inline void prefetch_scales(const Weights& w, const Ahead& ahead, int64_t b, int64_t s, int64_t first) {
  const int64_t group = group_of(w, ahead.block + b, ahead.segment + s - first);
  _mm_prefetch(w.scales + group, _MM_HINT_T0);
  _mm_prefetch(w.biases + group, _MM_HINT_T0);
}

inline __m512i of_coarse_and_fine(__m512i coarse, __m512i fine) {
  return _mm512_add_epi32(_mm512_slli_epi32(coarse, 8), fine);
}

inline __m512 read_halves(const uint16_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// total += what the dot products `sums` of a segment stand for, in its steps.
inline void scale_and_add(float* total, __m512i sums, const Segment& segment, __m512 scale, __m512 bias) {
  const __m512 dot = _mm512_mul_ps(_mm512_cvtepi32_ps(sums), _mm512_set1_ps(segment.step));
  const __m512 value = _mm512_fmadd_ps(scale, dot, _mm512_loadu_ps(total));
  _mm512_storeu_ps(total, _mm512_fmadd_ps(bias, _mm512_set1_ps(segment.sum), value));
}

}  // namespace
