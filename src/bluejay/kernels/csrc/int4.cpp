// bluejay::int4_linear for the CPU: checks, choice of the path, threads. Only torch's stable interface is used, so a
// build takes seconds and depends on no internal of torch.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "int4_paths.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kRowsAtOnce = 256;    // what is packed of x then stays near, however long the prompt
constexpr int64_t kLongestSegment = 256;
constexpr int64_t kPartInputs = 1024;   // of x that are packed at a time
constexpr int64_t kAheadBytes = 16384;  // of codes that a thread asks for with each part that it packs
constexpr int kLooks = 2000;            // at what others pack, before this thread lets another one have its core
constexpr int64_t kFewForTiles = 4;     // rows up to which vectors should need no more time than preparing a tile
constexpr int64_t kFewRows = 2;         // up to which a thread reads one stream of codes rather than share loads of x

// Bit by bit what the paths need; Python asks for it.
enum Feature : unsigned { kAvx2 = 1, kAvx512 = 2, kVnni = 4, kAmx = 8 };

// Whether the processor multiplies tiles, and the system, asked for this process, keeps their registers for it.
bool has_tiles() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr unsigned kTiles = 1u << 24, kInt8 = 1u << 25;  // leaf 7, edx
  constexpr int kRequest = 0x1023, kTileData = 18;         // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d;
  if (!int4_amx || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || ~d & (kTiles | kInt8)) return false;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

unsigned features() {
#if defined(__x86_64__)
  static const unsigned found = [] {
    unsigned bits = 0;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) bits |= kAvx2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
      bits |= kAvx512;
    if ((bits & kAvx512) && __builtin_cpu_supports("avx512vnni")) bits |= kVnni;
    if ((bits & kVnni) && has_tiles()) bits |= kAmx;
    return bits;
  }();
  return found;
#else
  return 0;
#endif
}

const Path& choose(const std::string& name, Type type, int64_t num_rows) {
  if (name == "portable") return int4_portable;
#if defined(__x86_64__)
  const unsigned found = features();
  // Integer products, for what has no more digits than they keep. Tiles and vectors give the same bits.
  const bool integers = type == Type::bfloat16 && (found & kVnni);
  const bool tiles = integers && (found & kAmx) && num_rows > kFewForTiles;
  if (name == "x8" && integers) return tiles ? *int4_amx_x8 : int4_avx512_vnni_x8;
  if ((name == "auto" || name == "amx") && tiles) return *int4_amx;
  const bool is_there = name == "amx" ? found & kAmx : name == "x8" ? found & kVnni : found & kAvx512;
  if (is_there && name != "avx2") return integers ? int4_avx512_vnni : int4_avx512;
  if ((found & kAvx2) && (name == "auto" || name == "avx2")) return int4_avx2;
#endif
  if (name == "auto") return int4_portable;
  STD_TORCH_CHECK(false, "int4_linear: this processor has no path ", name);
}

Type type_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::BFloat16: return Type::bfloat16;
    case ScalarType::Float: return Type::float32;
    case ScalarType::Half: return Type::float16;
    default: STD_TORCH_CHECK(false, "int4_linear: x must be bfloat16, float32 or float16");
  }
}

// Memory that a thread keeps from call to call: fresh pages would cost as much as the work on few rows.
template <class T>
T* room(std::vector<T>& kept, int64_t count) {
  if (int64_t(kept.size()) < count) kept.resize(count);
  return kept.data();
}

void widen(const void* x, Type type, int64_t first, int64_t count, float* to) {
  if (type == Type::float32) {
    std::copy_n(static_cast<const float*>(x) + first, count, to);
  } else if (type == Type::bfloat16) {
    const auto* from = static_cast<const uint16_t*>(x) + first;
    for (int64_t k = 0; k < count; ++k) to[k] = bfloat_to_float(from[k]);
  } else {
    const auto* from = static_cast<const uint16_t*>(x) + first;
    for (int64_t k = 0; k < count; ++k) to[k] = half_to_float(from[k]);
  }
}

// Codes of some blocks from byte `begin` of each on: memory would rest while x is packed.
void ask_for(const Weights& w, int64_t first, int64_t last, int64_t begin) {
  for (int64_t block = first; block < std::min(last, w.blocks); ++block) {
    const char* codes = reinterpret_cast<const char*>(w.codes + block * w.chunks * kOutputs);
    const int64_t end = std::min(begin + kAheadBytes / (last - first), w.chunks * 64);
    for (int64_t at = begin; at < end; at += 64) __builtin_prefetch(codes + at, 0, 2);
  }
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void multiply(const Path& path, const Weights& w, const void* x, int64_t num_rows, int64_t width, Result result) {
  thread_local std::vector<uint32_t> kept_x;
  thread_local std::vector<Segment> kept_segments;
  const int64_t words = words_of(path, w);
  const int64_t y_size = result.type == Type::float32 ? 4 : 2;
  const int64_t part_segments = std::max<int64_t>(1, kPartInputs / (w.segment_chunks * 8));
  const int64_t parts = (w.segments + part_segments - 1) / part_segments;
  for (int64_t done = 0; done < num_rows; done += kRowsAtOnce) {
    const int64_t count = std::min(num_rows - done, kRowsAtOnce);
    uint32_t* packed = room(kept_x, (count + kRowsBehind) * words);
    Segment* segments = room(kept_segments, count * w.segments);
    const Rows rows{count, (count + path.tile_rows - 1) / path.tile_rows, words, packed, segments};
    const auto pack = [&](int64_t tile, int64_t part) {
      thread_local std::vector<float> kept;
      const int64_t begin = tile_begin(rows, tile), size = tile_begin(rows, tile + 1) - begin;
      const int64_t first = part * part_segments, last = std::min(first + part_segments, w.segments);
      const int64_t from = first * w.segment_chunks * 8;
      const int64_t padded = end_of(w, last - 1) * 8 - from, present = std::min(padded, width - from);
      float* wide = room(kept, size * padded);
      for (int64_t m = 0; m < size; ++m) {
        widen(x, result.type, (done + begin + m) * width + from, present, wide + m * padded);
        std::fill(wide + m * padded + present, wide + (m + 1) * padded, 0.0f);
      }
      path.pack(w, wide, size, first, last, packed + begin * words, segments + begin * w.segments);
    };
    Result here = result;
    here.y = static_cast<char*>(result.y) + done * result.outputs * y_size;
    const int64_t threads = torch::stable::get_num_threads();
    const int64_t step = count <= kFewRows ? 1 : path.step;
    const int64_t steps = (w.blocks + step - 1) / step, units = rows.tiles * parts;
    std::atomic<int64_t> claimed{0}, packed_units{0}, taken{0};
    // A share of what is left: large pieces first, and a thread that was held up leaves the small ones to the others.
    const auto take = [&]() -> std::pair<int64_t, int64_t> {
      int64_t begin = taken.load(), end;
      do {
        end = begin + std::min(steps - begin, std::max<int64_t>(1, (steps - begin) / (4 * threads)));
      } while (!taken.compare_exchange_weak(begin, end));
      return {begin, end};
    };
    // One region for both: beginning another costs as much as packing a row. A thread waits only for what others have
    // begun to pack, so it does not matter how many of them there are, or whether they run one after the other.
    torch::stable::parallel_for(0, std::min(threads, std::max(steps, units)), 1, [&](int64_t, int64_t) {
      thread_local std::vector<float> kept;
      float* totals = room(kept, count * step * kOutputs);
      auto now = take();
      int64_t asked = 0;
      for (int64_t unit; (unit = claimed++) < units; ++packed_units) {
        ask_for(w, now.first * step, (now.first + 1) * step, asked);
        asked += kAheadBytes / step;
        pack(unit / parts, unit % parts);
      }
      for (int looks = 0; packed_units < units; ++looks) looks < kLooks ? pause() : std::this_thread::yield();
      while (now.first < steps) {
        const auto next = take();  // before the work, whose end asks memory for what comes then
        const int64_t end = std::min(now.second * step, w.blocks);
        path.run(w, rows, here, now.first * step, end, next.first * step, step, totals);
        now = next;
      }
    });
  }
}

Tensor int4_linear(const Tensor& x, const Tensor& codes, const Tensor& scales, const Tensor& biases,
                   const std::optional<Tensor>& bias, int64_t out_features, int64_t group_size,
                   const std::string& path) {
  if (path == "torch" || path == "reference") {
    using torch::stable::detail::from;
    std::array<StableIValue, 8> stack{from(x), from(codes), from(scales), from(biases), from(bias),
                                      from(out_features), from(group_size), from(path)};
    STABLE_TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher("bluejay::int4_linear_plain", "", stack.data(), TORCH_ABI_VERSION));
    return torch::stable::detail::to<Tensor>(stack[0]);
  }
  const Type type = type_of(x);
  const int64_t width = x.size(-1), num_rows = width ? x.numel() / width : 0;
  const int64_t groups = group_size == -1 ? 1 : (width + group_size - 1) / std::max<int64_t>(group_size, 1);
  STD_TORCH_CHECK(group_size == -1 || (group_size >= 16 && group_size <= 256 && group_size % 8 == 0),
                  "int4_linear: group_size must be -1 or a multiple of 8 from 16 to 256, got ", group_size);
  STD_TORCH_CHECK(codes.scalar_type() == ScalarType::Int && scales.scalar_type() == ScalarType::Half &&
                      biases.scalar_type() == ScalarType::Half,
                  "int4_linear: codes must be int32, scales and biases float16");
  STD_TORCH_CHECK(codes.dim() == 3 && codes.size(0) == (out_features + 15) / 16 && codes.size(1) == (width + 7) / 8 &&
                      codes.size(2) == 16,
                  "int4_linear: codes do not fit ", out_features, " outputs of ", width, " inputs");
  for (const Tensor& part : {scales, biases})
    STD_TORCH_CHECK(part.dim() == 3 && part.size(0) == codes.size(0) && part.size(1) == groups && part.size(2) == 16,
                    "int4_linear: scales or biases do not fit ", groups, " groups");
  STD_TORCH_CHECK(codes.is_contiguous() && scales.is_contiguous() && biases.is_contiguous(),
                  "int4_linear: a packed weight must be contiguous");
  STD_TORCH_CHECK(!bias || (bias->dim() == 1 && bias->numel() == out_features &&
                            bias->scalar_type() == x.scalar_type()),
                  "int4_linear: bias must have ", out_features, " elements of the type of x");
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = out_features;
  Tensor y = torch::stable::new_empty(x, shape);
  if (num_rows == 0 || out_features == 0) return y;
  const Tensor rows = torch::stable::contiguous(x);
  const std::optional<Tensor> added = bias ? std::optional(torch::stable::contiguous(*bias)) : std::nullopt;

  const int64_t segment = std::min(group_size == -1 ? kLongestSegment : group_size, codes.size(1) * 8);
  const Weights w{static_cast<const uint32_t*>(codes.data_ptr()),
                  static_cast<const uint16_t*>(scales.data_ptr()),
                  static_cast<const uint16_t*>(biases.data_ptr()),
                  codes.size(0), codes.size(1), groups, (codes.size(1) * 8 + segment - 1) / segment, segment / 8};
  multiply(choose(path, type, num_rows), w, rows.data_ptr(), num_rows, width,
           {y.data_ptr(), added ? added->data_ptr() : nullptr, type, out_features});
  return y;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) unsigned bluejay_int4_features() { return features(); }

STABLE_TORCH_LIBRARY_IMPL(bluejay, CPU, m) { m.impl("int4_linear", TORCH_BOX(&int4_linear)); }
