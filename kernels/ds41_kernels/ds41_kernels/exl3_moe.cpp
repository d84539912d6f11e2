// EXL3 experts on the CPU: y = sum over chosen experts of weight * w2(swiglu(w1 x, w3 x)), straight from the trellis.
//
// C++17, C ABI. The loops exist three times (portable, AVX2, AVX-512) and give the same bits: every product and sum is
// done in one fixed order, fused where the source says so. A token's result depends on nothing but the token: not on
// the batch, its order, or the number of threads.
//
// Activations stay in single precision; the GPU kernels' roundings to half are not imitated.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "loops.h"
#include "pool.h"

extern "C" {

// One layer: W [in, out]. `halves` is twice the bits a weight; half-precision vectors are given as their bits.
struct Ds41Exl3Linear {
  const uint16_t* trellis;  // [in / 16][out / 16][8 * halves]
  const uint16_t* suh;      // [in]
  const uint16_t* svh;      // [out]
  int32_t halves;
  int32_t codebook;
  int64_t in;
  int64_t out;
};

struct Ds41Exl3Expert {
  Ds41Exl3Linear w1, w3, w2;  // w1.trellis null: the expert is on another rank and adds nothing
};

}  // extern "C"

namespace {

using ds41::Pool;
using ds41::Worker;

constexpr int kEdge = 16;
constexpr int kWeights = 256;
constexpr int kHadamard = 128;
constexpr int kTiles = kHadamard / kEdge;
constexpr int kCodebooks = 3;
constexpr int kMostHalves = 16;
constexpr float kHadamardScale = 0.08838834764831845f;  // 1 / sqrt(128)
constexpr int64_t kTokensAtOnce = 256;                  // bounds the scratch memory

// ---- half precision

float half_to_float(uint16_t half) {
  const int sign = half >> 15, exponent = (half >> 10) & 31, fraction = half & 1023;
  float value;
  if (exponent == 31) value = fraction ? NAN : INFINITY;
  else if (exponent) value = std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  else value = std::ldexp(static_cast<float>(fraction), -24);
  return sign ? -value : value;
}

// To the nearest half and back, ties to even; for normal values within range, which is all a codebook has.
float round_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (std::fabs(value) < 6.103515625e-05f) return std::nearbyint(value * 16777216.0f) / 16777216.0f;  // subnormal
  bits += 0x0fff + ((bits >> 13) & 1);
  bits &= ~uint32_t{0x1fff};
  std::memcpy(&value, &bits, 4);
  return value;
}

// ---- codebooks

constexpr uint32_t kMul1Factor = 0x83DCD12D, kMcgFactor = 0xCBAC1FED;
constexpr uint32_t kThreeFactor = 89226354, kThreeOffset = 64248484;
constexpr uint32_t kKept = 0x8FFF8FFF, kFlipped = 0x3B603B60;
constexpr float kMul1Slope = 0.00676727294921875f;  // half 0x1eee
constexpr float kMul1Offset = -10.3828125f;         // half 0xc931

float decode_state(uint32_t state, int codebook) {
  if (codebook == 2) {
    const uint32_t product = state * kMul1Factor;
    const uint32_t sum = (product & 255) + ((product >> 8) & 255) + ((product >> 16) & 255) + (product >> 24);
    // the rounding of the single-precision sum changes no result: the same as a half fma for all states
    return round_to_half(static_cast<float>(1024 + sum) * kMul1Slope + kMul1Offset);
  }
  const uint32_t product = codebook == 1 ? state * kMcgFactor : state * kThreeFactor + kThreeOffset;
  const uint32_t bits = (product & kKept) ^ kFlipped;
  return round_to_half(half_to_float(static_cast<uint16_t>(bits)) + half_to_float(static_cast<uint16_t>(bits >> 16)));
}

// Values of all states, for the portable loops.
const float* codebook_values(int codebook) {
  struct Tables {
    std::vector<float> values = std::vector<float>(kCodebooks << 16);
    Tables() {
      for (int book = 0; book < kCodebooks; ++book)
        for (uint32_t state = 0; state < 65536; ++state)
          values[static_cast<size_t>(book) << 16 | state] = decode_state(state, book);
    }
  };
  static const Tables tables;
  return tables.values.data() + (static_cast<size_t>(codebook) << 16);
}

// ---- where a position's state lies in the stream

// For each of the 256 positions: the 32-bit word in which its 16 bits begin, counted from the word before the stream,
// and the bit in it. `base` and `index` split the word for 16 (wide) or 8 (narrow) neighbours loaded at once.
struct Windows {
  int32_t words = 0;  // of the stream
  int32_t word[kWeights];
  int32_t shift[kWeights];
  int32_t wide_base[16], narrow_base[32];
  int32_t wide_index[kWeights], narrow_index[kWeights];
};

struct AllWindows {
  Windows of[kMostHalves + 1];
  AllWindows() {
    for (int halves = 2; halves <= kMostHalves; ++halves) {
      Windows& out = of[halves];
      out.words = 4 * halves;
      int end = 0;
      for (int position = 0; position < kWeights; ++position) {
        end += halves / 2 + (position & halves & 1);
        const int first = end - 16 + 32;  // the word before the stream is a copy of its last one
        out.word[position] = first / 32;
        out.shift[position] = first % 32;
      }
      for (int position = 0; position < kWeights; ++position) {
        out.wide_base[position / 16] = out.word[position / 16 * 16];
        out.narrow_base[position / 8] = out.word[position / 8 * 8];
        out.wide_index[position] = out.word[position] - out.word[position / 16 * 16];
        out.narrow_index[position] = out.word[position] - out.word[position / 8 * 8];
      }
    }
  }
};

const Windows& windows(int halves) {
  static const AllWindows all;
  return all.of[halves];
}

constexpr int kSlack = 16;  // what a wide load may read beyond the stream

// The stream of one tile with its last word before it.
struct Stream {
  uint32_t word[1 + 4 * kMostHalves + kSlack] = {};
  void load(const uint16_t* tile, int words) {
    std::memcpy(word + 1, tile, static_cast<size_t>(words) * 4);
    word[0] = word[words];
  }
};

// Order of 16 activations in which the loops read them: inputs 2q, 2q+1, 2q+8, 2q+9 of a tile for q = 0..3.
constexpr int kOrder[kEdge] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};

// exp in double precision, by mul and add alone: the same bits everywhere. Error below 1e-14.
double exponential(double x) {
  x = std::min(std::max(x, -700.0), 700.0);
  const double n = std::floor(x * 1.4426950408889634 + 0.5);
  const double r = (x - n * 0.693145751953125) - n * 1.4286068203094172e-06;
  double sum = 1.0;
  for (int term = 13; term > 0; --term) sum = 1.0 + sum * r / term;
  return std::ldexp(sum, static_cast<int>(n));
}

float swiglu(float gate, float up, float limit) {
  if (limit > 0) {
    gate = std::min(gate, limit);
    up = std::min(std::max(up, -limit), limit);
  }
  return static_cast<float>(gate / (1.0 + exponential(-static_cast<double>(gate)))) * up;
}

namespace portable {
struct Vector {
  float lane[16];
};
inline Vector load(const float* from) {
  Vector out;
  std::memcpy(out.lane, from, sizeof out.lane);
  return out;
}
inline void store(float* to, const Vector& value) { std::memcpy(to, value.lane, sizeof value.lane); }
inline Vector fused(const Vector& a, const Vector& b, const Vector& c) {
  Vector out;
  for (int i = 0; i < 16; ++i) out.lane[i] = std::fmaf(a.lane[i], b.lane[i], c.lane[i]);
  return out;
}
// Quads (first, first, first + 1, first + 1) of 16 activations.
template <int kFirst>
inline Vector spread(const Vector& x) {
  Vector out;
  for (int i = 0; i < 16; ++i) out.lane[i] = x.lane[(kFirst + i / 8) * 4 + i % 4];
  return out;
}
void decode_tile(const Stream& stream, const Windows& where, int codebook, float* out) {
  const float* const values = codebook_values(codebook);
  for (int position = 0; position < kWeights; ++position) {
    const uint64_t high = stream.word[where.word[position]], low = stream.word[where.word[position] + 1];
    out[position] = values[((high << 32 | low) >> (48 - where.shift[position])) & 0xffff];
  }
}
#include "exl3_loops.inc"
}  // namespace portable

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DS41_DISPATCH 1

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
struct Vector {
  __m256 low, high;
};
inline Vector load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void store(float* to, const Vector& value) {
  _mm256_storeu_ps(to, value.low);
  _mm256_storeu_ps(to + 8, value.high);
}
inline Vector fused(const Vector& a, const Vector& b, const Vector& c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
template <int kFirst>
inline Vector spread(const Vector& x) {
  const __m256 half = kFirst ? x.high : x.low;
  return {_mm256_permute2f128_ps(half, half, 0x00), _mm256_permute2f128_ps(half, half, 0x11)};
}
inline __m256 rounded(__m256 value) { return _mm256_cvtph_ps(_mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT)); }
inline __m256 from_halves(__m256i low16) {
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low16, low16), 0xd8);
  return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
}
template <int kCodebook>
inline __m256 decode(__m256i state) {
  if (kCodebook == 2) {
    const __m256i product = _mm256_mullo_epi32(state, _mm256_set1_epi32(static_cast<int>(kMul1Factor)));
    const __m256i pairs = _mm256_maddubs_epi16(product, _mm256_set1_epi8(1));
    const __m256i sum = _mm256_add_epi32(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)), _mm256_set1_epi32(1024));
    const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_set1_ps(kMul1Slope));
    return rounded(_mm256_add_ps(scaled, _mm256_set1_ps(kMul1Offset)));
  }
  const uint32_t factor = kCodebook == 1 ? kMcgFactor : kThreeFactor, offset = kCodebook == 1 ? 0 : kThreeOffset;
  const __m256i product = _mm256_add_epi32(
      _mm256_mullo_epi32(state, _mm256_set1_epi32(static_cast<int>(factor))),
      _mm256_set1_epi32(static_cast<int>(offset)));
  const __m256i bits = _mm256_xor_si256(
      _mm256_and_si256(product, _mm256_set1_epi32(static_cast<int>(kKept))),
      _mm256_set1_epi32(static_cast<int>(kFlipped)));
  const __m256 low = from_halves(_mm256_and_si256(bits, _mm256_set1_epi32(0xffff)));
  return rounded(_mm256_add_ps(low, from_halves(_mm256_srli_epi32(bits, 16))));
}
template <int kCodebook>
void decode_all(const Stream& stream, const Windows& where, float* out) {
  for (int block = 0; block < 32; ++block) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(stream.word + where.narrow_base[block]));
    const __m256i index = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(where.narrow_index + 8 * block));
    const __m256i shift = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(where.shift + 8 * block));
    const __m256i high = _mm256_permutevar8x32_epi32(words, index);
    const __m256i low = _mm256_permutevar8x32_epi32(words, _mm256_add_epi32(index, _mm256_set1_epi32(1)));
    const __m256i both = _mm256_or_si256(
        _mm256_sllv_epi32(high, shift), _mm256_srlv_epi32(low, _mm256_sub_epi32(_mm256_set1_epi32(32), shift)));
    _mm256_storeu_ps(out + 8 * block, decode<kCodebook>(_mm256_srli_epi32(both, 16)));
  }
}
void decode_tile(const Stream& stream, const Windows& where, int codebook, float* out) {
  if (codebook == 2) decode_all<2>(stream, where, out);
  else if (codebook == 1) decode_all<1>(stream, where, out);
  else decode_all<0>(stream, where, out);
}
#include "exl3_loops.inc"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx2,fma,f16c")
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12 warns of its own _mm512_undefined_epi32()
namespace avx512 {
struct Vector {
  __m512 all;
};
inline Vector load(const float* from) { return {_mm512_loadu_ps(from)}; }
inline void store(float* to, const Vector& value) { _mm512_storeu_ps(to, value.all); }
inline Vector fused(const Vector& a, const Vector& b, const Vector& c) { return {_mm512_fmadd_ps(a.all, b.all, c.all)}; }
template <int kFirst>
inline Vector spread(const Vector& x) {
  constexpr int kQuads = kFirst | kFirst << 2 | (kFirst + 1) << 4 | (kFirst + 1) << 6;
  return {_mm512_shuffle_f32x4(x.all, x.all, kQuads)};
}
inline __m512 rounded(__m512 value) { return _mm512_cvtph_ps(_mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT)); }
template <int kCodebook>
inline __m512 decode(__m512i state) {
  if (kCodebook == 2) {
    const __m512i product = _mm512_mullo_epi32(state, _mm512_set1_epi32(static_cast<int>(kMul1Factor)));
    const __m512i pairs = _mm512_maddubs_epi16(product, _mm512_set1_epi8(1));
    const __m512i sum = _mm512_add_epi32(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)), _mm512_set1_epi32(1024));
    const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(kMul1Slope));
    return rounded(_mm512_add_ps(scaled, _mm512_set1_ps(kMul1Offset)));
  }
  const uint32_t factor = kCodebook == 1 ? kMcgFactor : kThreeFactor, offset = kCodebook == 1 ? 0 : kThreeOffset;
  const __m512i product = _mm512_add_epi32(
      _mm512_mullo_epi32(state, _mm512_set1_epi32(static_cast<int>(factor))),
      _mm512_set1_epi32(static_cast<int>(offset)));
  const __m512i bits = _mm512_xor_si512(
      _mm512_and_si512(product, _mm512_set1_epi32(static_cast<int>(kKept))),
      _mm512_set1_epi32(static_cast<int>(kFlipped)));
  const __m512 low = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(bits));
  return rounded(_mm512_add_ps(low, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)))));
}
template <int kCodebook>
void decode_all(const Stream& stream, const Windows& where, float* out) {
  for (int block = 0; block < 16; ++block) {
    const __m512i words = _mm512_loadu_si512(stream.word + where.wide_base[block]);
    const __m512i index = _mm512_loadu_si512(where.wide_index + 16 * block);
    const __m512i shift = _mm512_loadu_si512(where.shift + 16 * block);
    const __m512i high = _mm512_permutexvar_epi32(index, words);
    const __m512i low = _mm512_permutexvar_epi32(_mm512_add_epi32(index, _mm512_set1_epi32(1)), words);
    const __m512i both = _mm512_or_si512(
        _mm512_sllv_epi32(high, shift), _mm512_srlv_epi32(low, _mm512_sub_epi32(_mm512_set1_epi32(32), shift)));
    _mm512_storeu_ps(out + 16 * block, decode<kCodebook>(_mm512_srli_epi32(both, 16)));
  }
}
void decode_tile(const Stream& stream, const Windows& where, int codebook, float* out) {
  if (codebook == 2) decode_all<2>(stream, where, out);
  else if (codebook == 1) decode_all<1>(stream, where, out);
  else decode_all<0>(stream, where, out);
}
#include "exl3_loops.inc"
}  // namespace avx512
#pragma GCC diagnostic pop
#pragma GCC pop_options
#endif

struct Loops {
  const char* name;
  void (*decode_tile)(const Stream&, const Windows&, int, float*);
  void (*rotate)(const float*, const uint16_t*, int64_t, float*);
  void (*multiply)(const Ds41Exl3Linear&, int64_t, const float* const*, int64_t, float*, float*);
};

constexpr Loops kLoops[] = {
    {"portable", portable::decode_tile, portable::rotate, portable::multiply},
#ifdef DS41_DISPATCH
    {"avx2", avx2::decode_tile, avx2::rotate, avx2::multiply},
    {"avx512", avx512::decode_tile, avx512::rotate, avx512::multiply},
#endif
};

int best_loops() {
#ifdef DS41_DISPATCH
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) return 2;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return 1;
#endif
  return 0;
}

std::atomic<int> chosen_loops{best_loops()};

// ---- one layer of experts

// The slots (token, place among its experts) that one expert serves.
struct Group {
  const Ds41Exl3Expert* expert;
  std::vector<int64_t> slots;
};

struct Work {
  const Loops* loops;
  const float* x;
  int64_t hidden, inner, per_token;
  float limit;
  std::vector<Group> groups;
  float *gate_input, *up_input;  // [slots][hidden], rotated and ordered
  float* down_input;             // [slots][inner], rotated and ordered
  float* parts;                  // [slots][hidden]
  std::atomic<int64_t>* next;
};

// Rows of a matrix [slots][width].
std::vector<const float*> rows_of(const Group& group, const float* matrix, int64_t width) {
  std::vector<const float*> out;
  for (const int64_t slot : group.slots) out.push_back(matrix + slot * width);
  return out;
}

void rotate_inputs(const Work& work, const Group& group) {
  for (const int64_t slot : group.slots) {
    const float* const x = work.x + slot / work.per_token * work.hidden;
    work.loops->rotate(x, group.expert->w1.suh, work.hidden, work.gate_input + slot * work.hidden);
    work.loops->rotate(x, group.expert->w3.suh, work.hidden, work.up_input + slot * work.hidden);
  }
}

// 128 inner channels of an expert, up to the input of w2.
void gate_and_up(const Work& work, const Group& group, int64_t block) {
  const int64_t count = static_cast<int64_t>(group.slots.size()), first = block * kHadamard;
  std::vector<float> gate(static_cast<size_t>(count * kHadamard)), up(gate.size());
  std::vector<float> scratch(static_cast<size_t>(count * kWeights / 2));
  const auto gate_rows = rows_of(group, work.gate_input, work.hidden);
  const auto up_rows = rows_of(group, work.up_input, work.hidden);
  work.loops->multiply(group.expert->w1, block, gate_rows.data(), count, scratch.data(), gate.data());
  work.loops->multiply(group.expert->w3, block, up_rows.data(), count, scratch.data(), up.data());
  for (size_t i = 0; i < gate.size(); ++i) gate[i] = swiglu(gate[i], up[i], work.limit);
  for (int64_t i = 0; i < count; ++i)
    work.loops->rotate(
        gate.data() + i * kHadamard, group.expert->w2.suh + first, kHadamard,
        work.down_input + group.slots[static_cast<size_t>(i)] * work.inner + first);
}

// 128 outputs of an expert.
void down(const Work& work, const Group& group, int64_t block) {
  const int64_t count = static_cast<int64_t>(group.slots.size());
  std::vector<float> out(static_cast<size_t>(count * kHadamard));
  std::vector<float> scratch(static_cast<size_t>(count * kWeights / 2));
  const auto rows = rows_of(group, work.down_input, work.inner);
  work.loops->multiply(group.expert->w2, block, rows.data(), count, scratch.data(), out.data());
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(
        work.parts + group.slots[static_cast<size_t>(i)] * work.hidden + block * kHadamard, out.data() + i * kHadamard,
        kHadamard * sizeof(float));
}

template <void (*kUnit)(const Work&, const Group&, int64_t), bool kInner>
void units(const Worker&, const void* argument) {
  const Work& work = *static_cast<const Work*>(argument);
  const int64_t blocks = (kInner ? work.inner : work.hidden) / kHadamard;
  const int64_t total = static_cast<int64_t>(work.groups.size()) * blocks;
  for (int64_t unit; (unit = work.next->fetch_add(1)) < total;)
    kUnit(work, work.groups[static_cast<size_t>(unit / blocks)], unit % blocks);
}

void rotations(const Worker&, const void* argument) {
  const Work& work = *static_cast<const Work*>(argument);
  const int64_t total = static_cast<int64_t>(work.groups.size());
  for (int64_t unit; (unit = work.next->fetch_add(1)) < total;) rotate_inputs(work, work.groups[static_cast<size_t>(unit)]);
}

void run(Pool* pool, Pool::Task task, Work& work) {
  work.next->store(0);
  if (pool && pool->size() > 1) pool->run(task, &work);
  else task({0, 0, 1, -1}, &work);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Name of the loops in use. `force` (for tests and benchmarks): "portable", "avx2", "avx512"; NULL changes nothing. NULL
// is returned for loops that this build or processor does not have.
const char* ds41_exl3_loops(const char* force) {
  return choose_loops(kLoops, best_loops(), chosen_loops, force);
}

// out[i][p] = the value of position p of tile i, by the loops in use.
void ds41_exl3_decode(const uint16_t* tiles, int64_t count, int32_t halves, int32_t codebook, float* out) {
  const Loops& loops = kLoops[chosen_loops.load()];
  const Windows& where = windows(halves);
  Stream stream;
  for (int64_t tile = 0; tile < count; ++tile) {
    stream.load(tiles + tile * 8 * halves, where.words);
    loops.decode_tile(stream, where, codebook, out + tile * kWeights);
  }
}

// out[t] = sum over j of weights[t][j] * expert chosen[t][j] of x[t], in the order of j. Shapes: x and out
// [tokens][hidden], chosen and weights [tokens][per_token]. Returns -1; the index of the first expert number out of
// range (nothing was computed); -2 without memory.
int64_t ds41_exl3_moe(
    Pool* pool, const Ds41Exl3Expert* experts, int64_t n_experts, const float* x, int64_t tokens, int64_t hidden,
    int64_t inner, const int64_t* chosen, const float* weights, int64_t per_token, float limit, float* out) {
  for (int64_t slot = 0; slot < tokens * per_token; ++slot)
    if (chosen[slot] < 0 || chosen[slot] >= n_experts) return slot;
  try {
    const size_t slots = static_cast<size_t>(std::min(tokens, kTokensAtOnce) * per_token);
    const size_t wide = slots * static_cast<size_t>(hidden), narrow = slots * static_cast<size_t>(inner);
    const std::unique_ptr<float[]> memory(new float[3 * wide + narrow]);
    std::atomic<int64_t> next{0};
    for (int64_t first = 0; first < tokens; first += kTokensAtOnce) {
      const int64_t count = std::min(kTokensAtOnce, tokens - first);
      Work work{};
      work.loops = &kLoops[chosen_loops.load()];
      work.x = x + first * hidden;
      work.hidden = hidden;
      work.inner = inner;
      work.per_token = per_token;
      work.limit = limit;
      work.gate_input = memory.get();
      work.up_input = memory.get() + wide;
      work.parts = memory.get() + 2 * wide;
      work.down_input = memory.get() + 3 * wide;
      work.next = &next;
      const int64_t* const mine = chosen + first * per_token;
      std::vector<std::vector<int64_t>> by_expert(static_cast<size_t>(n_experts));
      for (int64_t slot = 0; slot < count * per_token; ++slot)
        by_expert[static_cast<size_t>(mine[slot])].push_back(slot);
      for (int64_t number = 0; number < n_experts; ++number) {
        std::vector<int64_t>& members = by_expert[static_cast<size_t>(number)];
        if (!members.empty() && experts[number].w1.trellis) work.groups.push_back({experts + number, std::move(members)});
      }
      {
        std::unique_lock<std::mutex> hold;
        if (pool) hold = std::unique_lock<std::mutex>(pool->mutex);
        run(pool, rotations, work);
        run(pool, units<gate_and_up, true>, work);
        run(pool, units<down, false>, work);
      }
      for (int64_t token = 0; token < count; ++token) {
        float* const row = out + (first + token) * hidden;
        std::fill(row, row + hidden, 0.0f);
        for (int64_t place = 0; place < per_token; ++place) {
          const int64_t slot = token * per_token + place;
          if (!experts[mine[slot]].w1.trellis) continue;
          const float weight = weights[first * per_token + slot];
          const float* const part = work.parts + slot * hidden;
          for (int64_t i = 0; i < hidden; ++i) row[i] = row[i] + weight * part[i];
        }
      }
    }
  } catch (const std::bad_alloc&) {
    return -2;
  }
  return -1;
}

}  // extern "C"
#pragma GCC visibility pop
