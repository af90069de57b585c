// AMX, for bfloat16 x of more than a few rows: the integer products of int4_integers.h by tiles of 16 rows x 16
// outputs x up to 64 inputs. Codes need no further work than for one row: 8 chunks, their low digits above their high
// digits, are a tile of products with q and r, and as they lie in memory a tile of products with p.
#include "int4.h"

#if defined(__AMX_INT8__)
#include "int4_integers.h"

namespace {

constexpr int kTileRows = 16;
constexpr int kLargestPiece = 8;  // chunks whose two digits fill the 16 rows of a tile

// Chunks that are multiplied at a time: as many as fit a tile and divide a segment.
inline int64_t piece_of(const Weights& w) {
  int64_t piece = kLargestPiece;
  while (w.segment_chunks % piece) --piece;
  return piece;
}

// By piece, then by row: q of its chunks, then r, then p.
template <bool kFine>
void pack(const Weights& w, const float* x, int64_t rows, int64_t first, int64_t last, uint32_t* packed,
          Segment* segments) {
  const int64_t start = first * w.segment_chunks, chunks = end_of(w, last - 1) - start, piece = piece_of(w);
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t s = first; s < last; ++s) {
      const int64_t begin = s * w.segment_chunks, count = end_of(w, s) - begin;
      uint32_t* to = packed + (begin * rows + m * piece) * kParts<kFine>;
      const auto place = [&](int64_t c, int part) -> uint32_t& {
        return to[(c / piece * rows * kParts<kFine> + part) * piece + c % piece];
      };
      segments[s * rows + m] = pack_segment<kFine>(x + (m * chunks + begin - start) * 8, count, place);
      for (int64_t c = count; c % piece; ++c)
        for (int part = 0; part < kParts<kFine>; ++part) place(c, part) = 0;
    }
}

// Rows of the tile registers in a call whose largest tile has `tallest`: one register's or two's.
inline int64_t height_of(int64_t tallest) { return tallest > kTileRows ? (tallest + 1) / 2 : tallest; }

// The tile registers: two sums for each half of the rows, x for one half, codes for both.
enum Tile { kCoarse0, kCoarse1, kFine0, kFine1, kX, kFineX, kDigits, kCodes };

// Instructions, written out: some compilers' own do not say that they read and write memory.
inline void configure(const void* shapes) { asm volatile("ldtilecfg (%0)" ::"r"(shapes) : "memory"); }
inline void release() { asm volatile("tilerelease" ::: "memory"); }

template <Tile tile>
void clear() {
  asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}

template <Tile tile>
void load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
}

template <Tile tile>
void store(void* to) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(int64_t{kOutputs * 4}), "i"(tile) : "memory");
}

// sum += x . codes, four products of a signed and an unsigned byte at a time.
template <Tile sum, Tile x, Tile codes>
void multiply() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(x), "i"(codes));
}

struct alignas(64) Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  Shapes(int64_t height, int64_t piece) {
    const auto set = [this](int tile, int64_t num_rows, int64_t num_bytes) {
      rows[tile] = uint8_t(num_rows);
      row_bytes[tile] = uint16_t(num_bytes);
    };
    for (int tile = kCoarse0; tile <= kFine1; ++tile) set(tile, height, kOutputs * 4);
    set(kX, height, 8 * piece);
    set(kFineX, height, 4 * piece);
    set(kDigits, 2 * piece, kOutputs * 4);
    set(kCodes, piece, kOutputs * 4);
  }
};

// Adds the products of one half of the rows, whose x begins at `x`, with the codes that are loaded.
template <bool kFine, Tile coarse, Tile fine>
void multiply_half(const char* x, int64_t stride, int64_t piece) {
  load<kX>(x, stride);
  multiply<coarse, kX, kDigits>();
  if constexpr (kFine) {
    load<kFineX>(x + 8 * piece, stride);
    multiply<fine, kFineX, kCodes>();
  }
}

// Segments [first, last) of one block, for a tile of `size` rows in registers of `height`. The last rows of a register
// may be nobody's: what comes of them is not looked at.
template <bool kFine>
void multiply_tile(int64_t height, int64_t piece, int64_t size, const Weights& w, int64_t block, int64_t first,
                   int64_t last, const uint32_t* x, const Segment* segments, float* totals, const Ahead& ahead) {
  alignas(64) char digits[2 * kLargestPiece][64], rest[kLargestPiece][64];
  alignas(64) int32_t coarse[2 * kTileRows][kOutputs], fine[2 * kTileRows][kOutputs];
  const __m512i low = _mm512_set1_epi8(15);
  const int64_t length = w.chunks * 64, x_stride = 4 * kParts<kFine> * piece;
  const bool has_two = size > height;
  for (int64_t s = first; s < last; ++s) {
    Prefetch<1> prefetch{codes_ahead(w, ahead, s, first), length, ahead.part, ahead.parts};
    if (ahead.part == 0) prefetch_scales(w, ahead, 0, s, first);
    clear<kCoarse0>();
    clear<kFine0>();
    clear<kCoarse1>();
    clear<kFine1>();
    const int64_t begin = s * w.segment_chunks, end = end_of(w, s);
    for (int64_t c = begin; c < end; c += piece) {
      const char* codes = reinterpret_cast<const char*>(w.codes) + block * length + c * 64;
      const int64_t count = smaller(piece, end - c);
      for (int64_t i = 0; i < count; ++i) {
        prefetch(c - begin + i);
        const __m512i raw = _mm512_loadu_si512(codes + i * 64);
        _mm512_store_si512(digits[i], _mm512_and_si512(raw, low));
        _mm512_store_si512(digits[piece + i], _mm512_and_si512(_mm512_srli_epi32(raw, 4), low));
      }
      load<kDigits>(digits, 64);
      if constexpr (kFine) {
        if (count < piece) {  // nothing lies behind the last chunk of the last block
          memcpy(rest, codes, count * 64);
          codes = rest[0];
        }
        load<kCodes>(codes, 64);
      }
      const auto* here = reinterpret_cast<const char*>(x) + c * size * 4 * kParts<kFine>;
      multiply_half<kFine, kCoarse0, kFine0>(here, x_stride, piece);
      if (has_two) multiply_half<kFine, kCoarse1, kFine1>(here + height * x_stride, x_stride, piece);
    }
    store<kCoarse0>(coarse);
    if constexpr (kFine) store<kFine0>(fine);
    if (has_two) {
      store<kCoarse1>(coarse[height]);
      if constexpr (kFine) store<kFine1>(fine[height]);
    }
    const int64_t group = group_of(w, block, s);
    const __m512 scale = read_halves(w.scales + group), bias = read_halves(w.biases + group);
    for (int64_t m = 0; m < size; ++m) {
      const Segment& segment = segments[s * size + m];
      const __m512i start = _mm512_set1_epi32(segment.start), high = _mm512_load_si512(coarse[m]);
      const __m512i sums = kFine ? of_coarse_and_fine(high, _mm512_add_epi32(_mm512_load_si512(fine[m]), start))
                                 : _mm512_add_epi32(high, start);
      scale_and_add(totals + m * kOutputs, sums, segment, scale, bias);
    }
  }
}

template <bool kFine>
void run(const Weights& w, const Rows& rows, const Result& result, int64_t first, int64_t last, int64_t next,
         int64_t step, float* totals) {
  const int64_t piece = piece_of(w), height = height_of((rows.count + rows.tiles - 1) / rows.tiles);
  const Shapes shapes(height, piece);
  configure(&shapes);
  run_blocks(w, rows, result, first, last, next, step, totals,
             [&](int64_t, int64_t size, const auto&... rest) { multiply_tile<kFine>(height, piece, size, rest...); });
  release();
}

const Path path = {"amx", 2 * kTileRows, 1, 3, pack<true>, run<true>};
const Path path_x8 = {"x8", 2 * kTileRows, 1, 2, pack<false>, run<false>};

}  // namespace

const Path *const int4_amx = &path, *const int4_amx_x8 = &path_x8;
#else
const Path *const int4_amx = nullptr, *const int4_amx_x8 = nullptr;  // the compiler does not know these instructions
#endif
