// y = x W^T for a few rows x and an MXFP4 matrix W, decoded one row at a time into the cache: a matrix that is used once
// by a handful of tokens costs its packed bytes, not its fp32 ones. For the fp32 oracle, which streams packs from disk.
//
// C++17, C ABI. Sums run over 16 lanes and four rows of x, whatever the instruction set, without contraction: all builds
// give the same bits.

#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t kGroup = 32;   // values that share a scale
constexpr int kLanes = 16;
constexpr int kRows = 4;

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));

struct Pairs {
    float of[256][2];
    Pairs() {
        const float level[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
        for (int byte = 0; byte < 256; ++byte)
            for (int half = 0; half < 2; ++half) {
                const int code = (byte >> (4 * half)) & 15;
                of[byte][half] = code & 8 ? -level[code & 7] : level[code & 7];
            }
    }
};
const Pairs kPairs;

inline float scale_of(uint8_t byte) {
    const uint32_t bits = byte ? static_cast<uint32_t>(byte) << 23 : 0x00400000u;  // 2^-127 is subnormal
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DS41_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define DS41_CLONES
#endif

DS41_CLONES
void product(const uint8_t* codes, const uint8_t* scales, int64_t first, int64_t end, int64_t outputs, int64_t inputs,
             const float* x, int64_t tokens, float* row, float* out) {
    for (int64_t o = first; o < end; ++o) {
        const uint8_t* packed = codes + o * (inputs / 2);
        const uint8_t* scale = scales + o * (inputs / kGroup);
        for (int64_t group = 0; group < inputs / kGroup; ++group) {
            const float factor = scale_of(scale[group]);
            float* values = row + group * kGroup;
            for (int byte = 0; byte < kGroup / 2; ++byte)
                std::memcpy(values + 2 * byte, kPairs.of[packed[group * (kGroup / 2) + byte]], 2 * sizeof(float));
            for (int value = 0; value < kGroup; ++value) values[value] *= factor;
        }
        for (int64_t token = 0; token < tokens; token += kRows) {
            const int64_t count = tokens - token < kRows ? tokens - token : kRows;
            Vector sum[kRows] = {};
            if (count == kRows) {
                const float* rows[kRows];
                for (int r = 0; r < kRows; ++r) rows[r] = x + (token + r) * inputs;
                for (int64_t at = 0; at < inputs; at += kLanes) {
                    Vector w;
                    std::memcpy(&w, row + at, sizeof w);
                    for (int r = 0; r < kRows; ++r) {
                        Vector v;
                        std::memcpy(&v, rows[r] + at, sizeof v);
                        sum[r] += w * v;
                    }
                }
            } else {
                for (int64_t r = 0; r < count; ++r)
                    for (int64_t at = 0; at < inputs; at += kLanes) {
                        Vector w, v;
                        std::memcpy(&w, row + at, sizeof w);
                        std::memcpy(&v, x + (token + r) * inputs + at, sizeof v);
                        sum[r] += w * v;
                    }
            }
            for (int64_t r = 0; r < count; ++r) {
                float total = 0.0f;
                for (int lane = 0; lane < kLanes; ++lane) total += sum[r][lane];
                out[(token + r) * outputs + o] = total;
            }
        }
    }
}

}  // namespace

extern "C" __attribute__((visibility("default")))
// Outputs [first, end) of out[tokens, outputs]; codes [outputs, inputs / 2], scales [outputs, inputs / 32], x [tokens,
// inputs]; inputs a multiple of 32. Callers split the outputs over their threads. -1: no memory.
int32_t ds41_mxfp4_linear(const uint8_t* codes, const uint8_t* scales, int64_t first, int64_t end, int64_t outputs,
                          int64_t inputs, const float* x, int64_t tokens, float* out) {
    try {
        std::vector<float> row(static_cast<size_t>(inputs));
        product(codes, scales, first, end, outputs, inputs, x, tokens, row.data(), out);
        return 0;
    } catch (...) {
        return -1;
    }
}
