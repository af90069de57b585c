// The products of tiles against those of vectors, which must be the same bits. On a processor without tiles each of
// their instructions stops the program, is read as the processor's manual has it (Intel SDM, volume 2: LDTILECFG,
// TILELOADD, TILESTORED, TILEZERO, TDPBSUD, TILERELEASE) and done in C++. What it would refuse ends the test.
#include <cpuid.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "int4.h"

namespace {

struct Tiles {
  uint8_t shapes[64] = {};
  uint8_t data[8][16][64] = {};
  int done = 0;

  int rows(int tile) const { return shapes[48 + tile]; }
  int row_bytes(int tile) const { return shapes[16 + 2 * tile] | shapes[17 + 2 * tile] << 8; }
} tiles;

void require(bool holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "the processor would refuse: %s\n", what);
  _exit(3);
}

constexpr int kRegisters[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

// An instruction with the prefix of three bytes, C4.
struct Instruction {
  const uint8_t* at;
  greg_t* registers;
  int64_t stride = 0;
  int length = 5;

  int opcode() const { return at[3]; }
  int prefix() const { return at[2] & 3; }  // none, 66, F3, F2
  int other() const { return ~at[2] >> 3 & 15; }
  int reg() const { return (at[4] >> 3 & 7) | (~at[1] >> 4 & 8); }
  int rm() const { return (at[4] & 7) | (~at[1] >> 2 & 8); }
  bool is_register() const { return at[4] >> 6 == 3; }

  // The place in memory, without the index, which goes to `stride`.
  char* address() {
    const int mode = at[4] >> 6;
    int64_t place = 0;
    bool has_base = true;
    if ((at[4] & 7) == 4) {
      const int sib = at[length++], base = (sib & 7) | (~at[1] >> 2 & 8), index = (sib >> 3 & 7) | (~at[1] >> 3 & 8);
      if (index != 4) stride = registers[kRegisters[index]] << (sib >> 6);
      has_base = mode || (sib & 7) != 5;
      if (has_base) place = registers[kRegisters[base]];
    } else {
      require(mode || (at[4] & 7) != 5, "an address that this test does not read");
      place = registers[kRegisters[rm()]];
    }
    if (mode == 1) {
      place += int8_t(at[length++]);
    } else if (mode == 2 || !has_base) {
      int32_t distance;
      memcpy(&distance, at + length, 4);
      place += distance, length += 4;
    }
    return reinterpret_cast<char*>(place);
  }
};

void configure(const char* from) {
  memcpy(tiles.shapes, from, 64);
  memset(tiles.data, 0, sizeof tiles.data);
  require(tiles.shapes[0] == 1, "a palette that does not exist");
  for (int i = 1; i < 16; ++i) require(tiles.shapes[i] == 0, "reserved bytes that are not 0");
  for (int tile = 0; tile < 8; ++tile)
    require(tiles.rows(tile) <= 16 && tiles.row_bytes(tile) <= 64, "a tile that is too large");
  for (int i = 32; i < 48; ++i) require(tiles.shapes[i] == 0, "shapes of tiles beyond 8");
  for (int i = 56; i < 64; ++i) require(tiles.shapes[i] == 0, "shapes of tiles beyond 8");
}

void multiply(int sum, int x, int codes) {
  require(sum != x && sum != codes && x != codes, "one tile in two places");
  require(tiles.rows(sum) == tiles.rows(x) && tiles.row_bytes(sum) == tiles.row_bytes(codes) &&
              tiles.row_bytes(x) == 4 * tiles.rows(codes) && tiles.row_bytes(sum) % 4 == 0,
          "a product of tiles that do not fit");
  for (int m = 0; m < tiles.rows(sum); ++m)
    for (int k = 0; k < tiles.rows(codes); ++k)
      for (int n = 0; n < tiles.row_bytes(sum) / 4; ++n) {
        int32_t total;
        memcpy(&total, &tiles.data[sum][m][4 * n], 4);
        for (int i = 0; i < 4; ++i) total += int8_t(tiles.data[x][m][4 * k + i]) * tiles.data[codes][k][4 * n + i];
        memcpy(&tiles.data[sum][m][4 * n], &total, 4);
      }
}

void stand_in(int, siginfo_t*, void* context) {
  greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  Instruction it{reinterpret_cast<const uint8_t*>(registers[REG_RIP]), registers};
  require(it.at[0] == 0xc4 && (it.at[1] & 31) == 2 && !(it.at[2] & 0x84), "an unknown instruction");
  const bool is_configured = tiles.shapes[0] != 0;
  if (it.opcode() == 0x49 && it.prefix() == 0 && !it.is_register()) {
    const char* from = it.address();
    configure(from + it.stride);
  } else if (it.opcode() == 0x49 && it.prefix() == 0) {
    tiles.shapes[0] = 0;
  } else {
    require(is_configured, "a tile before its shape");
    if (it.opcode() == 0x49 && it.prefix() == 3 && it.is_register()) {
      memset(tiles.data[it.reg()], 0, sizeof tiles.data[0]);
    } else if (it.opcode() == 0x4b && !it.is_register() && (it.prefix() == 3 || it.prefix() == 2)) {
      char* place = it.address();
      if (it.prefix() == 3) memset(tiles.data[it.reg()], 0, sizeof tiles.data[0]);
      for (int row = 0; row < tiles.rows(it.reg()); ++row, place += it.stride) {
        if (it.prefix() == 3) memcpy(tiles.data[it.reg()][row], place, tiles.row_bytes(it.reg()));
        else memcpy(place, tiles.data[it.reg()][row], tiles.row_bytes(it.reg()));
      }
    } else if (it.opcode() == 0x5e && it.prefix() == 2 && it.is_register()) {
      multiply(it.reg(), it.rm(), it.other());
    } else {
      require(false, "an unknown instruction");
    }
  }
  ++tiles.done;
  registers[REG_RIP] += it.length;
}

// Memory behind which nothing can be read.
template <class T>
struct Fenced {
  size_t bytes, pages;
  char* mapped;
  T* data;

  explicit Fenced(int64_t count) : bytes(count * sizeof(T)), pages((bytes + 4095) / 4096 * 4096) {
    void* made = mmap(nullptr, pages + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) abort();
    mapped = static_cast<char*>(made);
    mprotect(mapped + pages, 4096, PROT_NONE);
    data = reinterpret_cast<T*>(mapped + pages - bytes);
  }
  Fenced(const Fenced&) = delete;
  ~Fenced() { munmap(mapped, pages + 4096); }

  T* begin() { return data; }
  T* end() { return data + bytes / sizeof(T); }
};

// y of some rows by a path, as the operation calls it.
std::vector<float> times(const Path& path, const Weights& w, const std::vector<float>& x, int64_t count,
                         int64_t outputs) {
  const int64_t words = words_of(path, w), width = w.chunks * 8;
  Fenced<uint32_t> packed((count + kRowsBehind) * words);
  for (auto& word : packed) word = 0x7b7b7b7b;
  std::vector<Segment> segments(count * w.segments);
  const Rows rows{count, (count + path.tile_rows - 1) / path.tile_rows, words, packed.data, segments.data()};
  for (int64_t tile = 0; tile < rows.tiles; ++tile) {
    const int64_t begin = tile_begin(rows, tile), size = tile_begin(rows, tile + 1) - begin;
    const int64_t middle = (w.segments + 1) / 2;
    const auto pack = [&](int64_t first, int64_t last) {  // in two parts, as threads do
      const int64_t from = first * w.segment_chunks * 8;
      const int64_t to = last * w.segment_chunks * 8 < width ? last * w.segment_chunks * 8 : width;
      std::vector<float> part;
      for (int64_t m = begin; m < begin + size; ++m) part.insert(part.end(), &x[m * width + from], &x[m * width] + to);
      path.pack(w, part.data(), size, first, last, packed.data + begin * words, segments.data() + begin * w.segments);
    };
    pack(0, middle);
    if (middle < w.segments) pack(middle, w.segments);
  }
  std::vector<float> y(count * outputs), totals(count * path.step * 16);
  path.run(w, rows, {y.data(), nullptr, Type::float32, outputs}, 0, w.blocks, w.blocks, path.step, totals.data());
  return y;
}

bool has_tiles() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 3) == 3 && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}

}  // namespace

int main() {
  if (!int4_amx) return fprintf(stderr, "the compiler knows no tiles\n"), 4;
  const bool real = has_tiles();
  if (!real) {
    struct sigaction action = {};
    action.sa_sigaction = stand_in;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGILL, &action, nullptr);
  }
  std::mt19937 random(1);
  const auto any = [&](uint32_t below) { return random() % below; };
  int compared = 0;
  for (const int64_t segment_chunks : {2, 4, 6, 8, 9, 16, 32})
    for (const int64_t chunks : {int64_t{5}, 2 * segment_chunks, 2 * segment_chunks + 1, 2 * segment_chunks + 3})
      for (const int64_t count : {1, 5, 15, 16, 17, 32, 33, 70}) {
        const int64_t length = segment_chunks < chunks ? segment_chunks : chunks;
        const int64_t groups = (chunks + length - 1) / length, blocks = 2, outputs = 29;
        Fenced<uint32_t> codes(blocks * chunks * 16);
        Fenced<uint16_t> scales(blocks * groups * 16), biases(blocks * groups * 16);
        std::vector<float> x(count * chunks * 8);
        for (auto& word : codes) word = random();
        for (auto& half : scales) half = uint16_t(0x2000 + any(0x1000));
        for (auto& half : biases) half = uint16_t(0xa000 + any(0x1000));
        for (auto& value : x) value = float(int32_t(any(65536)) - 32768) / 4096 * (any(50) ? 1 : 30);
        const Weights w{codes.data, scales.data, biases.data, blocks, chunks, groups, groups, length};
        const std::pair<const Path*, const Path*> pairs[] = {{&int4_avx512_vnni, int4_amx},
                                                             {&int4_avx512_vnni_x8, int4_amx_x8}};
        for (const auto& [vectors, by_tiles] : pairs) {
          const auto expected = times(*vectors, w, x, count, outputs), y = times(*by_tiles, w, x, count, outputs);
          if (memcmp(expected.data(), y.data(), y.size() * sizeof(float))) {
            printf("%s, %d rows, %d chunks in segments of %d: other bits\n", vectors->name, int(count), int(chunks),
                   int(length));
            return 1;
          }
          ++compared;
        }
      }
  if (!real && !tiles.done) return fprintf(stderr, "no tile was multiplied\n"), 5;
  printf("%d products are the same bits, by %s\n", compared, real ? "this processor's tiles" : "tiles in C++");
}
