// What the paths of int4_linear share. Each path is a file of its own, compiled with its own instruction set, so
// everything that is defined here and not plain C stays in an unnamed namespace: a function that the linker could
// merge with another file's would carry that file's instructions to a machine without them.
#pragma once

#include <cstdint>

// A packed weight (docs/kernels.md has the layout). K is cut into segments: its groups, or pieces of at most 256 inputs
// where the whole row is one group.
struct Weights {
  const uint32_t* codes;   // [blocks, chunks, 16]: 16 outputs x 8 inputs in 64 bytes
  const uint16_t* scales;  // [blocks, groups, 16], fp16
  const uint16_t* biases;  // [blocks, groups, 16], fp16
  int64_t blocks, chunks, groups;
  int64_t segments, segment_chunks;  // the last segment may be shorter
};

// Of one row in one segment.
struct Segment {
  float sum;        // of x
  float step;       // what one unit of the integer dot product stands for (integer paths)
  int32_t start;    // where that dot product begins (integer paths)
};

// Some rows of x, repacked for a path. Rows are cut into tiles of nearly equal size.
struct Rows {
  int64_t count, tiles, words;  // `words` of packed x per row, see words_of
  const uint32_t* x;            // by tile, then as the path wants it
  const Segment* segments;      // by tile, [segments, rows of the tile]
};

enum class Type { bfloat16, float32, float16 };

// y[row, output] = total + bias[output], rounded to `type`.
struct Result {
  void* y;
  const void* bias;  // of the same type, or null
  Type type;
  int64_t outputs;
};

struct Path {
  const char* name;
  int tile_rows;       // rows of the largest tile
  int step;            // blocks that are worked on together
  int words_per_chunk;  // of packed x
  // Pack segments [first, last) of one tile, whose packed x and segments begin at `packed` and `segments`. `x` holds
  // these inputs of its rows, one row after the other, in fp32 and padded with zeros to whole chunks.
  void (*pack)(const Weights&, const float* x, int64_t rows, int64_t first, int64_t last, uint32_t* packed,
               Segment* segments);
  // The outputs of blocks [first, last), `step` at a time; `next` is the block that this thread will be given then, and
  // `totals` has room for every row and `step` blocks.
  void (*run)(const Weights&, const Rows&, const Result&, int64_t first, int64_t last, int64_t next, int64_t step,
              float* totals);
};

// Of packed x: a row is padded to what a path multiplies at once, and a path may read so many rows behind the last one,
// whatever is there.
static inline int64_t words_of(const Path& path, const Weights& w) { return (w.chunks + 7) * path.words_per_chunk; }
constexpr int64_t kRowsBehind = 1;

static inline int64_t tile_begin(const Rows& rows, int64_t tile) { return rows.count * tile / rows.tiles; }

extern const Path int4_portable;
#if defined(__x86_64__)
extern const Path int4_avx2, int4_avx512, int4_avx512_vnni, int4_avx512_vnni_x8;
extern const Path *const int4_amx, *const int4_amx_x8;  // null where the compiler knows no tiles
#endif
