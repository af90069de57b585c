// Plain C++ for any processor; the compiler makes of the loops over 16 outputs what the machine has.
#include "int4_paths.h"

namespace {

struct Products {
  template <int B, int M>
  static void kernel(const Weights& w, int64_t block, int64_t first, int64_t last, const uint32_t* packed,
                     const Segment* segments, float* totals, const Ahead&) {
    const auto* x = reinterpret_cast<const float*>(packed);
    for (int64_t s = first; s < last; ++s) {
      float sums[M][kOutputs] = {};
      for (int64_t c = s * w.segment_chunks; c < end_of(w, s); ++c) {
        const uint32_t* codes = w.codes + (block * w.chunks + c) * kOutputs;
        for (int k = 0; k < 8; ++k) {
          const int shift = 16 * (k & 1) + 4 * (k >> 1);
          float code[kOutputs];
          for (int j = 0; j < kOutputs; ++j) code[j] = float(int32_t(codes[j] >> shift & 15u));
          for (int m = 0; m < M; ++m)
            for (int j = 0; j < kOutputs; ++j) sums[m][j] += code[j] * x[(c * 8 + k) * M + m];
        }
      }
      const int64_t group = group_of(w, block, s);
      for (int j = 0; j < kOutputs; ++j) {
        const float scale = half_to_float(w.scales[group + j]), bias = half_to_float(w.biases[group + j]);
        for (int m = 0; m < M; ++m) totals[m * kOutputs + j] += scale * sums[m][j] + bias * segments[s * M + m].sum;
      }
    }
  }
};

}  // namespace

const Path int4_portable = {"portable", 4, 1, 8, pack_floats, run_path<Products, 1, 4>};
