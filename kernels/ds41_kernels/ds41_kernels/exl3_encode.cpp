// The EXL3 encoder: the tail-biting path through the trellis that is nearest to 256 wanted values (Viterbi).

#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

namespace {

constexpr int kStates = 1 << 16;
constexpr int kWeights = 256;
constexpr int kMost = 1024;  // states at once: their costs and origins stay in the first-level cache

// the C library must resolve which clone to call (musl does not)
#if defined(__x86_64__) && defined(__GLIBC__)
#define DS41_WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define DS41_WIDE
#endif

// One step of the trellis. A state s is entered from the group s >> kBits (the states that end in these 16 - kBits bits)
// and left to the group of its own low bits; it costs entry[s >> kBits] + (value[s] - wanted)^2. For every group: the
// cheapest of the 2^kBits states that lead to it, and which one that is.
//
// With s = (member, middle, own) of kBits, 16 - 2 kBits and kBits bits, `value` is ordered [own][member][middle], so that
// the innermost loop runs over neighbours everywhere; `from` stays ordered [own][middle].
template <int kBits>
inline __attribute__((always_inline)) void step(
    const float* __restrict__ values, float wanted, const float* __restrict__ entry,
    float* __restrict__ leave, uint8_t* __restrict__ from) {
  constexpr int kMembers = 1 << kBits;
  constexpr int kMiddle = 1 << (16 - 2 * kBits);
  constexpr int kRun = kMiddle < kMost ? kMiddle : kMost;
  alignas(64) float best[kRun];
  alignas(64) int32_t origin[kRun];
  for (int own = 0; own < kMembers; ++own) {
    for (int begin = 0; begin < kMiddle; begin += kRun) {
      for (int i = 0; i < kRun; ++i) {
        best[i] = std::numeric_limits<float>::infinity();
        origin[i] = 0;
      }
      for (int member = 0; member < kMembers; ++member) {
        const float* const value = values + (own * kMembers + member) * kMiddle + begin;
        const float* const base = entry + member * kMiddle + begin;
        for (int i = 0; i < kRun; ++i) {
          const float error = value[i] - wanted;
          const float cost = base[i] + error * error;
          const bool better = cost < best[i];
          best[i] = better ? cost : best[i];
          origin[i] = better ? member : origin[i];
        }
      }
      for (int i = 0; i < kRun; ++i) leave[(begin + i) * kMembers + own] = best[i];
      for (int i = 0; i < kRun; ++i) from[own * kMiddle + begin + i] = static_cast<uint8_t>(origin[i]);
    }
  }
}

using Step = void (*)(const float*, float, const float*, float*, uint8_t*);

#define DS41_STEP(bits)                                                                                          \
  DS41_WIDE void step##bits(                                                                                     \
      const float* values, float wanted, const float* entry, float* leave, uint8_t* from) {                      \
    step<bits>(values, wanted, entry, leave, from);                                                              \
  }
DS41_STEP(1)
DS41_STEP(2)
DS41_STEP(3)
DS41_STEP(4)
DS41_STEP(5)
DS41_STEP(6)
DS41_STEP(7)
DS41_STEP(8)
constexpr Step kSteps[] = {nullptr, step1, step2, step3, step4, step5, step6, step7, step8};

class Encoder {
 public:
  Encoder(const float* values, int bits)
      : bits_(bits),
        members_(1 << bits),
        middle_(1 << (16 - 2 * bits)),
        groups_(kStates >> bits),
        values_(kStates),
        one_(static_cast<size_t>(groups_)),
        two_(static_cast<size_t>(groups_)),
        from_(static_cast<size_t>(groups_) * kWeights) {
    for (int state = 0; state < kStates; ++state) {
      const int own = state % members_, middle = state / members_ % middle_, member = state / groups_;
      values_[static_cast<size_t>((own * members_ + member) * middle_ + middle)] = values[state];
    }
  }

  // Best path over positions first, first + 1, ... (cyclic, 256 of them), entered and left through `through` when that
  // is a group, freely when it is -1. states[i] is the state of position (first + i) % 256.
  void path(const float* wanted, int first, int through, uint16_t* states) {
    float* entry = one_.data();
    float* leave = two_.data();
    for (int group = 0; group < groups_; ++group)
      entry[group] = through < 0 || group == through ? 0.0f : std::numeric_limits<float>::infinity();
    for (int index = 0; index < kWeights; ++index) {
      const float value = wanted[(first + index) % kWeights];
      kSteps[bits_](
          values_.data(), value, entry, leave, from_.data() + static_cast<size_t>(index) * groups_);
      float* const swap = entry;
      entry = leave;
      leave = swap;
    }
    int group = through;
    if (group < 0) {
      group = 0;
      for (int other = 1; other < groups_; ++other)
        if (entry[other] < entry[group]) group = other;
    }
    for (int index = kWeights - 1; index >= 0; --index) {
      const int origin = group % members_ * middle_ + group / members_;
      const int member = from_[static_cast<size_t>(index) * groups_ + origin];
      const int state = member * groups_ + group;
      states[index] = static_cast<uint16_t>(state);
      group = state >> bits_;
    }
  }

  int entry_group(uint16_t state) const { return state >> bits_; }

 private:
  int bits_, members_, middle_, groups_;
  std::vector<float> values_, one_, two_;
  std::vector<uint8_t> from_;
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// states[t][p] = a tail-biting path near wanted[t][p] for a codebook of 65,536 values and 1 to 8 whole bits a weight.
// Two passes a tile: a free path that starts in the middle finds the group to enter position 0 through, the second
// starts and ends there. Returns 0, -1 for a rate out of range, -2 without memory.
int32_t ds41_exl3_encode(
    const float* values, const float* wanted, int64_t tiles, int32_t bits, uint16_t* states) {
  if (bits < 1 || bits > 8) return -1;
  try {
    Encoder encoder(values, bits);
    std::vector<uint16_t> free_path(kWeights);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const float* const values_wanted = wanted + tile * kWeights;
      encoder.path(values_wanted, kWeights / 2, -1, free_path.data());
      encoder.path(
          values_wanted, 0, encoder.entry_group(free_path[kWeights / 2]), states + tile * kWeights);
    }
  } catch (const std::bad_alloc&) {
    return -2;
  }
  return 0;
}

}  // extern "C"
#pragma GCC visibility pop
