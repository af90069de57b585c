// The loops around a path's inner kernel. Included by each path's file, compiled with that file's instruction set.
#pragma once

#include <cstring>

#include "int4.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int kOutputs = 16;           // of a block
constexpr int64_t kCacheBytes = 8192;  // of codes that stay in the first cache while tiles of rows pass over them

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

inline float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

inline float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000u) << 16, body = half & 0x7fffu;
  if (body >= 0x7c00u) return from_bits(sign | 0x7f800000u | (body & 0x3ffu) << 13);
  // Both kinds of finite numbers at once: the exponent is put right by a product, which is exact.
  return from_bits(sign | to_bits(from_bits(body << 13) * 0x1p112f));
}

inline uint16_t float_to_half(float value) {
  const uint32_t bits = to_bits(value), sign = bits >> 16 & 0x8000u, body = bits & 0x7fffffffu;
  if (body > 0x7f800000u) return uint16_t(sign | 0x7e00u);
  if (body >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
  // Below 2^-14 the unit in the last place is fixed: adding 0.5 rounds to it. Above, round half to even on the bits.
  if (body < 0x38800000u) return uint16_t(sign | (to_bits(from_bits(body) + 0.5f) - 0x3f000000u));
  return uint16_t(sign | ((body + 0xfffu + (body >> 13 & 1u) - 0x38000000u) >> 13));
}

inline float bfloat_to_float(uint16_t value) { return from_bits(uint32_t(value) << 16); }

inline uint16_t float_to_bfloat(float value) {
  const uint32_t bits = to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16 | 0x40u);
  return uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline void finish(const Result& result, const float* totals, int64_t row, int64_t output) {
  const int64_t count = result.outputs - output < kOutputs ? result.outputs - output : kOutputs;
  const int64_t place = row * result.outputs + output;
  float sums[kOutputs];
  memcpy(sums, totals, sizeof sums);
  if (result.type == Type::float32) {
    if (result.bias)
      for (int64_t j = 0; j < count; ++j) sums[j] += static_cast<const float*>(result.bias)[output + j];
    memcpy(static_cast<float*>(result.y) + place, sums, count * sizeof(float));
    return;
  }
  const auto* bias = static_cast<const uint16_t*>(result.bias);
  auto* y = static_cast<uint16_t*>(result.y) + place;
  if (result.type == Type::bfloat16) {
    if (result.bias)
      for (int64_t j = 0; j < count; ++j) sums[j] += bfloat_to_float(bias[output + j]);
    for (int64_t j = 0; j < count; ++j) y[j] = float_to_bfloat(sums[j]);
  } else {
    if (result.bias)
      for (int64_t j = 0; j < count; ++j) sums[j] += half_to_float(bias[output + j]);
    for (int64_t j = 0; j < count; ++j) y[j] = float_to_half(sums[j]);
  }
}

inline int64_t end_of(const Weights& w, int64_t segment) {
  const int64_t end = (segment + 1) * w.segment_chunks;
  return end < w.chunks ? end : w.chunks;
}

// x in fp32, [chunks * 8, rows]: for paths that multiply floats.
inline void pack_floats(const Weights& w, const float* x, int64_t rows, int64_t first, int64_t last, uint32_t* packed,
                        Segment* segments) {
  const int64_t begin = first * w.segment_chunks * 8, width = end_of(w, last - 1) * 8 - begin;
  auto* to = reinterpret_cast<float*>(packed) + begin * rows;
  for (int64_t m = 0; m < rows; ++m) {
    const float* row = x + m * width;
    for (int64_t k = 0; k < width; ++k) to[k * rows + m] = row[k];
    for (int64_t s = first; s < last; ++s) {
      float sum = 0;
      for (int64_t k = s * w.segment_chunks * 8 - begin; k < end_of(w, s) * 8 - begin; ++k) sum += row[k];
      segments[s * rows + m] = {sum, 0, 0};
    }
  }
}

// What comes from memory next, and the share of it that a tile asks for while it computes: of every `parts` vectors of
// codes the one after `part`, and the first tile the scales. All tiles together ask for all, evenly, so that memory is
// as busy as the processor.
struct Ahead {
  int64_t block, segment;
  int64_t part, parts;
};

// Segments [first, last) of B blocks from `block` on, for a tile of M rows: added to totals[B][M][16]. Each path has a
// class with such a function for every B and M; loops over them are unrolled, so that sums stay in registers.
using Kernel = void(const Weights&, int64_t block, int64_t first, int64_t last, const uint32_t* x,
                    const Segment* segments, float* totals, const Ahead& ahead);

// Products::kernel<B, M> for every B and M that a path uses.
template <class Products, int kStep, int kRows>
struct Kernels {
  Kernel* of[kStep][kRows] = {};

  constexpr Kernels() { fill<1, 1>(); }

  template <int B, int M>
  constexpr void fill() {
    of[B - 1][M - 1] = Products::template kernel<B, M>;
    if constexpr (M < kRows) fill<B, M + 1>();
    else if constexpr (B < kStep) fill<B + 1, 1>();
  }
};

// Outputs of blocks [first, last), `step` at a time; `next` is where the thread goes on afterwards. `compute` is called
// as a Kernel, with the number of blocks and of the tile's rows before its arguments.
template <class Compute>
void run_blocks(const Weights& w, const Rows& rows, const Result& result, int64_t first, int64_t last, int64_t next,
                int64_t step, float* totals, const Compute& compute) {
  const int64_t pass = larger(1, kCacheBytes / (64 * step * w.segment_chunks));
  for (int64_t block = first; block < last; block += step) {
    const int64_t count = smaller(step, last - block);
    memset(totals, 0, rows.count * count * kOutputs * sizeof(float));
    for (int64_t from = 0; from < w.segments; from += pass) {
      const int64_t to = smaller(from + pass, w.segments);
      for (int64_t tile = 0; tile < rows.tiles; ++tile) {
        const int64_t begin = tile_begin(rows, tile), size = tile_begin(rows, tile + 1) - begin;
        const Ahead ahead = to < w.segments ? Ahead{block, to, tile, rows.tiles}
                                            : Ahead{block + step < last ? block + step : next, 0, tile, rows.tiles};
        compute(count, size, w, block, from, to, rows.x + begin * rows.words, rows.segments + begin * w.segments,
                totals + begin * count * kOutputs, ahead);
      }
    }
    for (int64_t tile = 0; tile < rows.tiles; ++tile) {
      const int64_t begin = tile_begin(rows, tile), size = tile_begin(rows, tile + 1) - begin;
      for (int64_t b = 0; b < count; ++b)
        for (int64_t m = 0; m < size; ++m)
          finish(result, totals + (begin * count + b * size + m) * kOutputs, begin + m, (block + b) * kOutputs);
    }
  }
}

// The same by kernels of at most kStep blocks and kRows rows of a tile.
template <class Products, int kStep, int kRows>
void run_path(const Weights& w, const Rows& rows, const Result& result, int64_t first, int64_t last, int64_t next,
              int64_t step, float* totals) {
  static constexpr Kernels<Products, kStep, kRows> kernels;
  run_blocks(w, rows, result, first, last, next, step, totals, [](int64_t blocks, int64_t size, const auto&... rest) {
    kernels.of[blocks - 1][size - 1](rest...);
  });
}

inline int64_t group_of(const Weights& w, int64_t block, int64_t segment) {
  return (block * w.groups + (w.groups == 1 ? 0 : segment)) * kOutputs;
}

// The codes that are as far into the next pass as segment `s` is into this one, which begins at `first`.
inline const char* codes_ahead(const Weights& w, const Ahead& ahead, int64_t s, int64_t first) {
  const int64_t chunk = ahead.block * w.chunks + (ahead.segment + s - first) * w.segment_chunks;
  return reinterpret_cast<const char*>(w.codes) + chunk * 64;
}

}  // namespace
