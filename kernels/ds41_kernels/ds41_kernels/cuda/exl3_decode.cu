// EXL3 mixture of experts for 1..64 tokens: the weights are read once for all tokens of an expert and decoded in
// registers. A token's row has the same bits alone and in any batch: the k-split depends on the shapes only, and the
// columns (or rows) of an MMA do not see each other.
#include "exl3_moe.cuh"

#if __CUDA_ARCH__ >= 800
// ------------------------------------------------------------------------------------------------ sm_80 and later
// Weights are the A operand (16 columns n of a tile are the 16 rows of A), activations the B operand. A codebook
// product feeds the MMA as it is: mul1's four bytes are four k entries of an int8 MMA that all meet the same
// activation, mcg's and 3inst's two halves are two k entries of an fp16 MMA. So no byte sum, no packing, no fma:
//   mul1: sum a * w = scale * (kinv * sum q * (bytes - 510) + c * sum q), all sums exact in integers;
//         the activation is a 16-bit fixed-point number in two planes, two of the eight columns of B
//   mcg, 3inst: sum a * (lo + hi) accumulated in fp32
// What this leaves out is the codebook's last rounding to fp16 (2e-4 of a weight, in no preferred direction).
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kTiles = 4;  // adjacent 16-column tiles of a warp
constexpr int kLeft = 5;   // of mul1 (see LaneWindows::states); 0 is 7 % slower on an H200, 6 and 7 make no difference
constexpr int kStripColumns = 16 * kTiles;

// A warp's ring of stages in shared memory. A stage is two k-tiles: their weights, then the activations of ROWS rows.
template <int K, int ROWS>
struct Ring {
    static constexpr int kWeightWords = kTiles * 8 * K;
    static constexpr int kTileWords = kWeightWords + ROWS * 8;  // 32 bytes of activation a row
    static constexpr int kTileChunks = kTileWords / 4;          // of 16 bytes
    static constexpr int kStageWords = 2 * kTileWords;
    static constexpr int kStages = K <= 5 ? 3 : 2;
    static constexpr int kWords = kStages * kStageWords;
};
// words of the largest ring among the rates that are built, and at least the room for the sums at the end
template <int ROWS>
__host__ __device__ constexpr int ring_words() {
    int most = 4 * kTiles * kWarp;
#define DS41_CASE(K) \
    if (((DS41_K_MASK >> K) & 1) && Ring<K, ROWS>::kWords > most) most = Ring<K, ROWS>::kWords;
    DS41_EACH_K(DS41_CASE)
#undef DS41_CASE
    return most;
}
static_assert(kWarps * Ring<5, 8>::kWords * 4 <= 48 * 1024 && kWarps * Ring<8, 8>::kWords * 4 <= 48 * 1024,
              "static shared");

DEVICE void mma(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <int CB>
struct SumOf {
    using Type = float;
};
template <>
struct SumOf<kMul1> {
    using Type = int;
};

// One 64-column strip of one group of up to ROWS (4 or 8) rows, for K bits.
template <int K, int CB, int ROWS>
DEVICE void strip(const Product& job, const Linear& linear, const Group& group, int my_slot, int projection,
                  u32* shared) {
    constexpr bool kBytes = CB == kMul1;
    constexpr int SETS = kBytes ? ROWS / 4 : 1;  // MMAs a weight fragment
    using Stage = Ring<K, ROWS>;
    using Sum = typename SumOf<CB>::Type;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int k_tiles = job.k / 16, n_tiles = job.n / 16;
    const int pairs = k_tiles / 2, share = (pairs + kWarps - 1) / kWarps;
    const int begin = min(pairs, warp * share), steps = min(pairs, begin + share) - begin;
    const LaneWindows<K> windows(lane);
    u32* ring = shared + warp * ring_words<ROWS>();

    // each lane copies the same 16-byte chunks of every stage; the pointers move on by a constant
    constexpr int kChunks = 2 * Stage::kTileChunks, kPerLane = (kChunks + kWarp - 1) / kWarp;
    const unsigned char* from[kPerLane];
    u32 stride[kPerLane];
    const u32 row_bytes = n_tiles * 32 * K;
    int slots[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        const int chunk = (i * kWarp + lane) % Stage::kTileChunks;
        slots[i] = __shfl_sync(0xffffffffu, my_slot, max(chunk - Stage::kWeightWords / 4, 0) / 2);
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        const int chunk = (i * kWarp + lane) % Stage::kTileChunks,
                  k_tile = 2 * begin + (i * kWarp + lane) / Stage::kTileChunks;
        if (chunk < Stage::kWeightWords / 4) {
            stride[i] = 2 * row_bytes;
            from[i] = reinterpret_cast<const unsigned char*>(linear.trellis) + (size_t)k_tile * row_bytes +
                      (size_t)blockIdx.x * kTiles * 32 * K + chunk * 16;
        } else {
            const int in_acts = chunk - Stage::kWeightWords / 4;
            const int slot = slots[i];  // rows beyond the group repeat its last one
            stride[i] = 64;
            from[i] =
                job.acts + ((size_t)slot * job.projections + projection) * job.k * 2 + k_tile * 32 + (in_acts % 2) * 16;
        }
    }
    const u32 target = (u32)__cvta_generic_to_shared(ring) + lane * 16;
    auto fetch = [&](int stage) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            if ((i + 1) * kWarp <= kChunks || i * kWarp + lane < kChunks)
                copy16(target + (stage * kChunks + i * kWarp) * 16, from[i]);
            from[i] += stride[i];
        }
    };

    Sum sums[SETS][kTiles][4];
#pragma unroll
    for (int s = 0; s < SETS; ++s)
        for (int t = 0; t < kTiles; ++t)
            for (int i = 0; i < 4; ++i) sums[s][t][i] = 0;

    const u32* lane_low = ring + windows.low[0];
    const u32* lane_high = ring + windows.high[0];
    const u32* lane_act = ring + Stage::kWeightWords + (kBytes ? lane : lane / 4 % ROWS * 8 + lane % 4 * 2);
    auto use = [&](int tile_of_ring) {
        u32 b[SETS][4];
        if constexpr (kBytes) {
#pragma unroll
            for (int s = 0; s < SETS; ++s) {
                const u32 quad = lane_act[tile_of_ring * Stage::kTileWords + s * kWarp];
#pragma unroll
                for (int i = 0; i < 4; ++i) b[s][i] = __byte_perm(quad, 0, 0x1111 * i);
            }
        } else {
            const uint2 quad = *reinterpret_cast<const uint2*>(lane_act + tile_of_ring * Stage::kTileWords);
            b[0][0] = __byte_perm(quad.x, 0, 0x1010), b[0][1] = __byte_perm(quad.x, 0, 0x3232);
            b[0][2] = __byte_perm(quad.y, 0, 0x1010), b[0][3] = __byte_perm(quad.y, 0, 0x3232);
        }
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            const int at = tile_of_ring * Stage::kTileWords + t * LaneWindows<K>::kWords;
            u32 low[LaneWindows<K>::kPairs], high[LaneWindows<K>::kPairs], w[8];
            low[0] = lane_low[at], high[0] = lane_high[at];
#pragma unroll
            for (int i = 1; i < LaneWindows<K>::kPairs; ++i)
                low[i] = ring[at + windows.low[i]], high[i] = ring[at + windows.high[i]];
            windows.template states<kBytes ? kLeft : 8>(low, high, w);
#pragma unroll
            for (int j = 0; j < 8; ++j) w[j] = product<CB>(w[j]);
#pragma unroll
            for (int s = 0; s < SETS; ++s) {
                mma(sums[s][t], w[0], w[4], w[1], w[5], b[s][0], b[s][1]);
                mma(sums[s][t], w[2], w[6], w[3], w[7], b[s][2], b[s][3]);
            }
        }
    };

    for (int i = 0; i < Stage::kStages - 1; ++i) {
        if (i < steps) fetch(i);
        copies_done();
    }
#pragma unroll 1
    for (int step = 0; step < steps; step += Stage::kStages) {
#pragma unroll
        for (int u = 0; u < Stage::kStages; ++u) {
            if (step + u >= steps) break;
            wait_copies<Stage::kStages - 2>();
            __syncwarp();
            if (step + u + Stage::kStages - 1 < steps) fetch((u + Stage::kStages - 1) % Stage::kStages);
            copies_done();
            use(2 * u);
            use(2 * u + 1);
        }
    }

    // the warps' shares of k, added in the order of the warps
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    Sum* parts = reinterpret_cast<Sum*>(shared);
    constexpr int kValues = kTiles * 4;
#pragma unroll
    for (int s = 0; s < SETS; ++s) {
        if (s) __syncthreads();
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) parts[(warp * kValues + t * 4 + i) * kWarp + lane] = sums[s][t][i];
        __syncthreads();
        const int pair = threadIdx.x / kWarp;  // 8 warps, 8 pairs of values
        Sum first = 0, second = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            first += parts[(w * kValues + pair * 2) * kWarp + lane];
            second += parts[(w * kValues + pair * 2 + 1) * kWarp + lane];
        }
        const int column = blockIdx.x * kStripColumns + (pair / 2) * 16 + (pair % 2) * 8 + lane / 4;
        if constexpr (kBytes) {
            const int row = s * 4 + lane % 4;
            if (row < group.count) {
                const size_t at = (size_t)job.work.sorted_slots[group.first + row] * job.projections + projection;
                const RowScale info = job.infos[at];
                const long long exact = 256ll * first + second - 510ll * info.sum;
                job.sums[at * job.n + column] =
                    info.scale * (0.00676727294921875f * (float)exact - 0.0018157958984375f * (float)info.sum);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = 2 * (lane % 4) + i;
                if (row < group.count) {
                    const size_t at = (size_t)job.work.sorted_slots[group.first + row] * job.projections + projection;
                    job.sums[at * job.n + column] = i ? second : first;
                }
            }
        }
    }
}

template <int CB, int ROWS>
DEVICE void multiply(const Product& job) {
    __shared__ __align__(16) u32 shared[kWarps * ring_words<ROWS>()];
    Group group;
    if (!take_group(job.work, group)) return;
    const int my_slot = job.work.sorted_slots[group.first + min((int)threadIdx.x % ROWS, group.count - 1)];
    const int projection = blockIdx.z;
    const Linear linear = job.linears[group.expert * 3 + job.first_projection + projection];
    switch (linear.bits) {
#define DS41_CASE(K)                                                                                               \
    case K:                                                                                                        \
        if constexpr ((DS41_K_MASK >> K) & 1) strip<K, CB, ROWS>(job, linear, group, my_slot, projection, shared); \
        break;
        DS41_EACH_K(DS41_CASE)
#undef DS41_CASE
    }
}
#define DS41_BOUNDS(ROWS) __launch_bounds__(kThreads, ROWS == 4 ? 4 : 2)
template <int CB>
constexpr int kFormat = CB == kMul1 ? kFixedPlanes : kHalfQuads;

#else
// ------------------------------------------------------------------------------------------------ sm_70
// m8n8k4 in the "diagonal" arrangement: in quad-pair p, column c < 4 of B is (n = p, k-quad c) and c >= 4 is
// (n = p + 4, k-quad c - 4), which is how the tile already lies in the lanes. Row r of A carries k-quad r % 4 of token
// r / 4, so C[r][c] is wanted where r % 4 == c % 4; the other products cost nothing that is scarce. Two MMAs a tile,
// two tokens each. The weights are the codebook's exact fp16 values, sums are fp32.
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kTiles = 2;
constexpr int kStripColumns = 16 * kTiles;
constexpr int kGroupRows = 2;

DEVICE void mma884(float (&d)[8], uint2 a, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9},{%10,%11},"
        "{%0,%1,%2,%3,%4,%5,%6,%7};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "r"(a.x), "r"(a.y), "r"(b0), "r"(b1));
}

template <int K>
struct Fragment {
    u32 low[kTiles][LaneWindows<K>::kPairs], high[kTiles][LaneWindows<K>::kPairs];
};

template <int K, int CB>
DEVICE void strip(const Product& job, const Linear& linear, const Group& group, int projection, float* shared) {
    using Windows = LaneWindows<K>;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, quad = lane % 4;
    const int k_tiles = job.k / 16, n_tiles = job.n / 16;
    const int share = (k_tiles + kWarps - 1) / kWarps;
    const int begin = min(k_tiles, warp * share), steps = min(k_tiles, begin + share) - begin;
    const Windows windows(lane);

    float sums[kTiles][2][8];
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
        for (int h = 0; h < 2; ++h)
            for (int i = 0; i < 8; ++i) sums[t][h][i] = 0.f;

    const u32* weights =
        linear.trellis + (size_t)begin * n_tiles * Windows::kWords + blockIdx.x * kTiles * Windows::kWords;
    const int slot = job.work.sorted_slots[group.first + min(lane >> 4, group.count - 1)];
    const uint2* acts =
        reinterpret_cast<const uint2*>(job.acts + ((size_t)slot * job.projections + projection) * job.k * 2) +
        begin * 4 + quad;
    const size_t stride = (size_t)n_tiles * Windows::kWords;
    auto load = [&](Fragment<K>& f, uint2& a) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int i = 0; i < Windows::kPairs; ++i) {
                f.low[t][i] = __ldg(weights + t * Windows::kWords + windows.low[i]);
                f.high[t][i] = __ldg(weights + t * Windows::kWords + windows.high[i]);
            }
        a = __ldg(acts), acts += 4;
        weights += stride;
    };
    auto use = [&](const Fragment<K>& f, uint2 a) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            u32 w[4];
            lane_weights<K, CB>(windows, f.low[t], f.high[t], w);
            mma884(sums[t][0], a, w[0], w[1]);
            mma884(sums[t][1], a, w[2], w[3]);
        }
    };
    if (steps > 0) {
        Fragment<K> now;
        uint2 a;
        load(now, a);
#pragma unroll 2
        for (int step = 1; step < steps; ++step) {
            Fragment<K> next;
            uint2 next_a;
            load(next, next_a);
            use(now, a);
            now = next;
            a = next_a;
        }
        use(now, a);
    }

    // of a lane's eight values the wanted ones are quad (column p) and quad + 4 (column p + 4), to be summed over quads
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float (&c)[8] = sums[t][h];
            float first = quad & 2 ? (quad & 1 ? c[3] : c[2]) : (quad & 1 ? c[1] : c[0]);
            float second = quad & 2 ? (quad & 1 ? c[7] : c[6]) : (quad & 1 ? c[5] : c[4]);
#pragma unroll
            for (int step = 1; step < 4; step <<= 1) {
                first += __shfl_xor_sync(0xffffffffu, first, step);
                second += __shfl_xor_sync(0xffffffffu, second, step);
            }
            if (quad == 0) {
                float* part =
                    shared + (warp * kGroupRows + (lane >> 4)) * kStripColumns + t * 16 + h * 8 + (lane & 15) / 4;
                part[0] = first;
                part[4] = second;
            }
        }
    __syncthreads();
    const int row = threadIdx.x / kStripColumns, column = threadIdx.x % kStripColumns;
    if (row < group.count) {
        float total = 0.f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) total += shared[(w * kGroupRows + row) * kStripColumns + column];
        const size_t at = (size_t)job.work.sorted_slots[group.first + row] * job.projections + projection;
        job.sums[at * job.n + blockIdx.x * kStripColumns + column] = total;
    }
}

template <int CB, int ROWS>
DEVICE void multiply(const Product& job) {
    static_assert(ROWS == kGroupRows, "the rows of one MMA");
    __shared__ float shared[kWarps * kGroupRows * kStripColumns];
    static_assert(kThreads >= kGroupRows * kStripColumns, "at most one result a thread");
    Group group;
    if (!take_group(job.work, group)) return;
    const int projection = blockIdx.z;
    const Linear linear = job.linears[group.expert * 3 + job.first_projection + projection];
    switch (linear.bits) {
#define DS41_CASE(K)                                                                                \
    case K:                                                                                         \
        if constexpr ((DS41_K_MASK >> K) & 1) strip<K, CB>(job, linear, group, projection, shared); \
        break;
        DS41_EACH_K(DS41_CASE)
#undef DS41_CASE
    }
}
#define DS41_BOUNDS(ROWS) __launch_bounds__(kThreads)
template <int CB>
constexpr int kFormat = kHalfQuads;
#endif

// Warp (k-tile, n-tile): the decoded fp16 weights of a linear, [k][n], before its rotations. For checks.
template <int K, int CB>
DEVICE void tile_weights(const u32* trellis, int k_tile, int n_tile, int n, half* out) {
    const int lane = threadIdx.x % kWarp, quad = lane % 4;
    const LaneWindows<K> windows(lane);
    const u32* tile = trellis + ((size_t)k_tile * (n / 16) + n_tile) * LaneWindows<K>::kWords;
    u32 low[LaneWindows<K>::kPairs], high[LaneWindows<K>::kPairs], w[4];
    for (int i = 0; i < LaneWindows<K>::kPairs; ++i) low[i] = tile[windows.low[i]], high[i] = tile[windows.high[i]];
    lane_weights<K, CB>(windows, low, high, w);
    for (int j = 0; j < 8; ++j) {
        const int k = k_tile * 16 + 2 * quad + (j & 1) + 8 * ((j >> 1) & 1),
                  column = n_tile * 16 + lane / 4 + 8 * (j >> 2);
        out[(size_t)k * n + column] = __ushort_as_half((u16)(w[j / 2] >> (16 * (j & 1))));
    }
}

template <int CB>
DEVICE void all_weights(const u32* trellis, int bits, int k, int n, half* out) {
    const int item = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp;
    if (item >= (k / 16) * (n / 16)) return;
    switch (bits) {
#define DS41_CASE(K)                                                                                                  \
    case K:                                                                                                           \
        if constexpr ((DS41_K_MASK >> K) & 1) tile_weights<K, CB>(trellis, item / (n / 16), item % (n / 16), n, out); \
        break;
        DS41_EACH_K(DS41_CASE)
#undef DS41_CASE
    }
}

#if __CUDA_ARCH__ >= 800
#define DS41_MULTIPLY_KERNELS(NAME, CB)                                                   \
    extern "C" __global__ void DS41_BOUNDS(4) exl3_decode_multiply4_##NAME(Product job) { \
        multiply<CB, 4>(job);                                                             \
    }                                                                                     \
    extern "C" __global__ void DS41_BOUNDS(8) exl3_decode_multiply8_##NAME(Product job) { \
        multiply<CB, 8>(job);                                                             \
    }
#else
#define DS41_MULTIPLY_KERNELS(NAME, CB)                                                   \
    extern "C" __global__ void DS41_BOUNDS(2) exl3_decode_multiply2_##NAME(Product job) { \
        multiply<CB, 2>(job);                                                             \
    }
#endif
#define DS41_DECODE_KERNELS(NAME, CB)                                                                               \
    extern "C" __global__ void __launch_bounds__(kStageThreads) exl3_decode_prepare_##NAME(                         \
        const half* x, const int* ids, const Linear* linears, int slots, int top_k, int experts, int hidden,        \
        int group_rows, unsigned char* acts, RowScale* infos, WorkList work) {                                      \
        __shared__ u16 counts[kStageWarps * kMaxExperts];                                                           \
        __shared__ int starts[kMaxExperts];                                                                         \
        prepare<kFormat<CB>>(x, ids, linears, slots, top_k, experts, hidden, group_rows, acts, infos, work, counts, \
                             starts);                                                                               \
    }                                                                                                               \
    DS41_MULTIPLY_KERNELS(NAME, CB)                                                                                 \
    extern "C" __global__ void __launch_bounds__(kStageThreads)                                                     \
        exl3_decode_middle_##NAME(const float* sums, const int* ids, const Linear* linears, int experts, int inter, \
                                  float limit, unsigned char* acts, RowScale* infos) {                              \
        middle<kFormat<CB>>(sums, ids, linears, experts, inter, limit, acts, infos);                                \
    }                                                                                                               \
    extern "C" __global__ void exl3_weights_##NAME(const u32* trellis, int bits, int k, int n, half* out) {         \
        all_weights<CB>(trellis, bits, k, n, out);                                                                  \
    }

#if DS41_CODEBOOK_MASK & 1
DS41_DECODE_KERNELS(3inst, kThreeInst)
#endif
#if DS41_CODEBOOK_MASK & 2
DS41_DECODE_KERNELS(mcg, kMcg)
#endif
#if DS41_CODEBOOK_MASK & 4
DS41_DECODE_KERNELS(mul1, kMul1)
#endif

extern "C" __global__ void __launch_bounds__(kFinishThreads)
    exl3_finish(const float* sums, const int* ids, const float* weights, const Linear* linears, int tokens, int top_k,
                int experts, int hidden, float scale, float* out) {
    finish(sums, ids, weights, linears, tokens, top_k, experts, hidden, scale, out);
}
