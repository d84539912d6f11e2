// EXL3 weights on the device: where a lane's eight states lie in the packed stream, and the three codebooks.
//
// A tile is 16 (k) x 16 (n) weights, 256 positions p = 8 * lane + j, stored as 256 * K bits, most significant bit first
// and tail-biting. State(p) is the 16 bits that end at bit (p + 1) * K. Lane L holds k in {2q, 2q+1, 2q+8, 2q+9}
// (q = L % 4) of column n = L / 4 for j = 0..3 and of column n + 8 for j = 4..7.
#pragma once
#include <cuda_fp16.h>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef signed char i8;

#define DEVICE __device__ __forceinline__

enum Codebook { kThreeInst = 0, kMcg = 1, kMul1 = 2 };

constexpr u32 kMul1Factor = 0x83DCD12Du;
constexpr u32 kMcgFactor = 0xCBAC1FEDu;
constexpr u32 kThreeInstFactor = 89226354u;
constexpr u32 kThreeInstOffset = 64248484u;
constexpr u16 kMul1Scale = 0x1eee;  // fp16 0.006767273
constexpr u16 kMul1Bias = 0xc931;   // fp16 -10.3828125
constexpr int kWarp = 32;

// One projection of one expert. 32 bytes; the host fills an array [experts][3] (gate, up, down).
struct Linear {
    const u32* trellis;  // [k/16][n/16][8 * bits] words
    const half* suh;     // [k]
    const half* svh;     // [n]
    int bits;            // K, 1..8
    int reserved;
};

// Which words of a tile a lane reads and how far it shifts them. `bits` is K; a window is 32 bits that hold several
// consecutive states. K <= 4: all eight states lie within two words. K = 5: two windows of four states, each with its
// own two words. K >= 6: four windows of two states.
template <int K>
struct LaneWindows {
    static constexpr int kWords = 8 * K;
    static constexpr int kWindows = K <= 2 ? 1 : (K <= 5 ? 2 : 4);
    static constexpr int kStates = 8 / kWindows;
    static constexpr int kPairs = K <= 4 ? 1 : kWindows;  // pairs of words loaded
    static_assert(16 + (kStates - 1) * K <= 32, "the states of a window fit a word");
    int low[kPairs];   // word with the least significant bits
    int high[kPairs];  // the word before it in the stream
    int shift[kPairs];

    DEVICE explicit LaneWindows(int lane) {
        const int end = (8 * lane + 8) * K;  // first bit after state 8 * lane + 7
        const int word = (end - 1) >> 5;
        const int offset = ((word + 1) << 5) - end;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            const int bit = offset + i * kStates * K;
            const int at = word - (bit >> 5);
            low[i] = (at + kWords) % kWords;
            high[i] = (at + 2 * kWords - 1) % kWords;
            shift[i] = bit & 31;
        }
    }

    // The eight states of the lane from its words, state[j] for position 8 * lane + j. A state is cut out by a shift
    // and a mask, both on the integer pipe, or by two shifts, the first of which can run as a multiplication on the fma
    // pipe: LEFT of eight states go that way, to load both pipes evenly.
    template <int LEFT = 0>
    DEVICE void states(const u32 (&lo)[kPairs], const u32 (&hi)[kPairs], u32 (&state)[8]) const {
#pragma unroll
        for (int w = 0; w < kWindows; ++w) {
            u32 window;
            if constexpr (K <= 4)
                window = (u32)((((u64)hi[0] << 32) | lo[0]) >> (shift[0] + w * kStates * K));
            else
                window = __funnelshift_r(lo[w], hi[w], shift[w]);
#pragma unroll
            for (int i = 0; i < kStates; ++i) {
                u32& found = state[7 - (w * kStates + i)];
                if (i > 0 && i * K < 16 && (i * kWindows + w) <= LEFT) {
                    u32 high;  // in assembly: the compiler would turn the two shifts back into a shift and a mask
                    asm("shl.b32 %0, %1, %2;" : "=r"(high) : "r"(window), "r"(16 - i * K));
                    found = high >> 16;
                } else {
                    found = (window >> (i * K)) & 0xffffu;
                }
            }
        }
    }
};

DEVICE u32 mask_halves(u32 x) {  // (x & 0x8fff8fff) ^ 0x3b603b60 in one instruction
    asm("lop3.b32 %0, %0, 0x8fff8fff, 0x3b603b60, 0x6a;" : "+r"(x));
    return x;
}

// The 32-bit product of a state: mul1 sums its four bytes, mcg and 3inst add its two fp16 halves.
template <int CB>
DEVICE u32 product(u32 state) {
    if constexpr (CB == kMul1) return state * kMul1Factor;
    if constexpr (CB == kMcg) return mask_halves(state * kMcgFactor);
    return mask_halves(state * kThreeInstFactor + kThreeInstOffset);
}

// Two weights as fp16, bit for bit the codebook's values. mul1 needs the fused multiply-add: a separate half multiply
// and add differ in 60,326 of the 65,536 states.
template <int CB>
DEVICE u32 weight_pair(u32 state0, u32 state1) {
    const u32 x0 = product<CB>(state0), x1 = product<CB>(state1);
    half2 value;
    if constexpr (CB == kMul1) {
        const u32 sum0 = __dp4a(x0, 0x01010101u, 0x6400u), sum1 = __dp4a(x1, 0x01010101u, 0x6400u);
        const u32 sums = __byte_perm(sum0, sum1, 0x5410);
        value = __hfma2(*reinterpret_cast<const half2*>(&sums), __half2half2(__ushort_as_half(kMul1Scale)),
                        __half2half2(__ushort_as_half(kMul1Bias)));
    } else {
        const u32 first = __byte_perm(x0, x1, 0x5410), second = __byte_perm(x0, x1, 0x7632);
        value = __hadd2(*reinterpret_cast<const half2*>(&first), *reinterpret_cast<const half2*>(&second));
    }
    return *reinterpret_cast<const u32*>(&value);
}

// Eight fp16 weights of a lane: out[0..1] column n, out[2..3] column n + 8; pairs (2q, 2q+1) and (2q+8, 2q+9).
template <int K, int CB>
DEVICE void lane_weights(const LaneWindows<K>& windows, const u32 (&lo)[LaneWindows<K>::kPairs],
                         const u32 (&hi)[LaneWindows<K>::kPairs], u32 (&out)[4]) {
    u32 state[8];
    windows.states(lo, hi, state);
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = weight_pair<CB>(state[2 * i], state[2 * i + 1]);
}

// Walsh-Hadamard transform of 128 values held by a warp, value 4 * lane + j in v[j], scaled by 1 / sqrt(128).
DEVICE void hadamard128(float (&v)[4], int lane) {
    const float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
    v[0] = a + c, v[1] = b + d, v[2] = a - c, v[3] = b - d;
#pragma unroll
    for (int step = 1; step < kWarp; step <<= 1) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float other = __shfl_xor_sync(0xffffffffu, v[j], step);
            v[j] = (lane & step) ? other - v[j] : v[j] + other;
        }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] *= 0.08838834764831845f;
}
