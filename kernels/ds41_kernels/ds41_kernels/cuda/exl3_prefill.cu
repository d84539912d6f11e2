// EXL3 mixture of experts for many tokens: rows sorted by expert, tiles of up to 64 rows, every weight decoded once a
// tile, k in order and never split. A row's result depends on the row alone, so slices of a batch give the same bits
// as the whole.
#include "exl3_moe.cuh"

constexpr int kPrefillRows = 64;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;

#if __CUDA_ARCH__ >= 800
// ------------------------------------------------------------------------------------------------ sm_80 and later
// A tile of EXL3 lies in the order of the B fragment of m16n8k16, so a warp decodes its 32 columns into registers and
// multiplies all rows of the tile with them; only packed weights and activations pass through shared memory.
constexpr int kTiles = 2;
constexpr int kStripTiles = kWarps * kTiles;
constexpr int kStages = 4;
constexpr int kRowWords = kPrefillRows * 16;  // two k-tiles of every row

template <int K>
struct Stage {
    static constexpr int kWeightWords = 2 * kStripTiles * 8 * K;
    static constexpr int kWords = kRowWords + kWeightWords;
};
constexpr int kSharedWords = kStages * Stage<8>::kWords;
static_assert(kSharedWords * 4 <= 48 * 1024, "static shared memory");

DEVICE void load_rows(u32 (&a)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address));
}

template <int K, int CB, int ROW_TILES>
DEVICE void strip(const Product& job, const Linear& linear, const Group& group, int projection, u32* shared) {
    using S = Stage<K>;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int n_tiles = job.n / 16, steps = job.k / 32;
    const int first_tile = blockIdx.x * kStripTiles;
    const LaneWindows<K> windows(lane);

    // activations: thread t copies 16 bytes (chunk t % 4) of row t / 4; weights: chunk t, t + 256 of the strip's tiles
    const int my_row = threadIdx.x / 4, my_chunk = threadIdx.x % 4;
    const int slot = job.work.sorted_slots[group.first + min(my_row, group.count - 1)];
    const unsigned char* act = job.acts + ((size_t)slot * job.projections + projection) * job.k * 2 + my_chunk * 16;
    constexpr int kChunks = S::kWeightWords / 4, kPerThread = (kChunks + kThreads - 1) / kThreads;
    const u32 row_bytes = n_tiles * 32 * K;
    const unsigned char* weights[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
        const int chunk = i * kThreads + threadIdx.x, in_row = chunk % (kChunks / 2), k_tile = chunk / (kChunks / 2);
        const int tile = min(first_tile + in_row / (2 * K), n_tiles - 1);  // past the last column: any valid tile
        weights[i] = reinterpret_cast<const unsigned char*>(linear.trellis) + (size_t)k_tile * row_bytes +
                     (size_t)tile * 32 * K + in_row % (2 * K) * 16;
    }
    const u32 base = (u32)__cvta_generic_to_shared(shared);
    const u32 act_to = base + (my_row * 4 + (my_chunk ^ (my_row >> 1 & 3))) * 16;
    const bool copies_act = my_row < ROW_TILES * 16;
    auto fetch = [&](int stage) {
        if (copies_act) copy16(act_to + stage * S::kWords * 4, act);
        act += 64;
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) {
            if (i * kThreads + threadIdx.x < kChunks)
                copy16(base + (stage * S::kWords + kRowWords) * 4 + (i * kThreads + threadIdx.x) * 16, weights[i]);
            weights[i] += 2 * row_bytes;
        }
    };

    float sums[ROW_TILES][2 * kTiles][4];
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
        for (int t = 0; t < 2 * kTiles; ++t)
            for (int i = 0; i < 4; ++i) sums[m][t][i] = 0.f;

    const int a_row = lane % 16, a_half = lane / 16;
    for (int i = 0; i < kStages - 1; ++i) {
        if (i < steps) fetch(i);
        copies_done();
    }
    const u32* lane_low = shared + kRowWords + warp * kTiles * LaneWindows<K>::kWords + windows.low[0];
    const u32* lane_high = lane_low - windows.low[0] + windows.high[0];
    // row * 4 + (chunk ^ (row >> 1 & 3)) in units of 16 bytes; rows of further row tiles only add a constant
    u32 a_from[2];
#pragma unroll
    for (int kk = 0; kk < 2; ++kk) a_from[kk] = base + (a_row * 4 + ((kk * 2 + a_half) ^ (a_row >> 1 & 3))) * 16;
    auto use = [&](int stage) {
#pragma unroll
        for (int kk = 0; kk < 2; ++kk) {
            u32 w[kTiles][4];
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                const int at = stage * S::kWords + (kk * kStripTiles + t) * LaneWindows<K>::kWords;
                u32 low[LaneWindows<K>::kPairs], high[LaneWindows<K>::kPairs];
                low[0] = lane_low[at], high[0] = lane_high[at];
#pragma unroll
                for (int i = 1; i < LaneWindows<K>::kPairs; ++i) {
                    low[i] = lane_low[at - windows.low[0] + windows.low[i]];
                    high[i] = lane_low[at - windows.low[0] + windows.high[i]];
                }
                lane_weights<K, CB>(windows, low, high, w[t]);
            }
#pragma unroll
            for (int m = 0; m < ROW_TILES; ++m) {
                u32 a[4];
                load_rows(a, a_from[kk] + (stage * S::kWords + m * 256) * 4);
#pragma unroll
                for (int t = 0; t < kTiles; ++t) {
                    mma(sums[m][2 * t], a[0], a[1], a[2], a[3], w[t][0], w[t][1]);
                    mma(sums[m][2 * t + 1], a[0], a[1], a[2], a[3], w[t][2], w[t][3]);
                }
            }
        }
    };
    // k is a multiple of 128, so steps is one of kStages. Stages are constants of the code where that leaves registers.
    constexpr int kUnroll = LaneWindows<K>::kPairs == 1 ? kStages : 1;
#pragma unroll 1
    for (int step = 0; step < steps; step += kStages) {
#pragma unroll kUnroll
        for (int u = 0; u < kStages; ++u) {
            wait_copies<kStages - 2>();
            __syncthreads();
            if (step + u + kStages - 1 < steps) fetch((u + kStages - 1) % kStages);
            copies_done();
            use(u);
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");

#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = m * 16 + half * 8 + lane / 4;
            if (row >= group.count) continue;
            const size_t at = (size_t)job.work.sorted_slots[group.first + row] * job.projections + projection;
#pragma unroll
            for (int t = 0; t < 2 * kTiles; ++t) {
                const int column = (first_tile + warp * kTiles) * 16 + t * 8 + lane % 4 * 2;
                if (column < job.n)
                    *reinterpret_cast<float2*>(job.sums + at * job.n + column) =
                        make_float2(sums[m][t][2 * half], sums[m][t][2 * half + 1]);
            }
        }
}
#define DS41_SHARED __shared__ __align__(16) u32 shared[kSharedWords]
#define DS41_BOUNDS __launch_bounds__(kThreads, 2)

#else
// ------------------------------------------------------------------------------------------------ sm_70
// Volta's MMA wants another order than the tile's, so each warp decodes a tile of its 16 columns into shared memory,
// k contiguous, and multiplies all rows with it through wmma.
#include <mma.h>
namespace wmma = nvcuda::wmma;

constexpr int kStripTiles = kWarps;
constexpr int kRowHalves = 32 + 8;     // two k-tiles of a row, padded against bank conflicts
constexpr int kColumnHalves = 16 + 8;  // one k-tile of a column

struct Shared {
    half rows[kPrefillRows * kRowHalves];
    half columns[kWarps][16 * kColumnHalves];
    float results[kWarps][16 * 16];
};

template <int K, int CB, int ROW_TILES>
DEVICE void strip(const Product& job, const Linear& linear, const Group& group, int projection, Shared* shared) {
    using Windows = LaneWindows<K>;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, quad = lane % 4;
    const int n_tiles = job.n / 16, steps = job.k / 32;
    const int tile = blockIdx.x * kStripTiles + warp;  // n is a multiple of 128: every warp has its columns
    const Windows windows(lane);
    const int my_row = threadIdx.x / 4, my_chunk = threadIdx.x % 4;
    const int slot = job.work.sorted_slots[group.first + min(my_row, group.count - 1)];
    const uint4* act =
        reinterpret_cast<const uint4*>(job.acts + ((size_t)slot * job.projections + projection) * job.k * 2) + my_chunk;
    const u32* weights = linear.trellis + (size_t)tile * Windows::kWords;
    const size_t stride = (size_t)n_tiles * Windows::kWords;
    half* columns = shared->columns[warp];

    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sums[ROW_TILES];
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) wmma::fill_fragment(sums[m], 0.f);

    u32 low[2][Windows::kPairs], high[2][Windows::kPairs];
    auto load = [&]() {
#pragma unroll
        for (int kk = 0; kk < 2; ++kk) {
#pragma unroll
            for (int i = 0; i < Windows::kPairs; ++i) {
                low[kk][i] = __ldg(weights + windows.low[i]);
                high[kk][i] = __ldg(weights + windows.high[i]);
            }
            weights += stride;
        }
    };
    constexpr bool kAhead = Windows::kPairs <= 2;  // K >= 6: so many words ahead would not leave registers for the sums
    uint4 chunk = __ldg(act);
    if (kAhead) load();
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        __syncthreads();
        *reinterpret_cast<uint4*>(shared->rows + my_row * kRowHalves + my_chunk * 8) = chunk;
        __syncthreads();
        if (!kAhead) load();
        u32 w[2][4];
#pragma unroll
        for (int kk = 0; kk < 2; ++kk) lane_weights<K, CB>(windows, low[kk], high[kk], w[kk]);
        if (step + 1 < steps) {
            act += 4;
            chunk = __ldg(act);
            if (kAhead) load();
        }
#pragma unroll
        for (int kk = 0; kk < 2; ++kk) {
            half* column = columns + lane / 4 * kColumnHalves + 2 * quad;
            *reinterpret_cast<u32*>(column) = w[kk][0];
            *reinterpret_cast<u32*>(column + 8) = w[kk][1];
            *reinterpret_cast<u32*>(column + 8 * kColumnHalves) = w[kk][2];
            *reinterpret_cast<u32*>(column + 8 * kColumnHalves + 8) = w[kk][3];
            __syncwarp();
            wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> b;
            wmma::load_matrix_sync(b, columns, kColumnHalves);
#pragma unroll
            for (int m = 0; m < ROW_TILES; ++m) {
                wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> a;
                wmma::load_matrix_sync(a, shared->rows + m * 16 * kRowHalves + kk * 16, kRowHalves);
                wmma::mma_sync(sums[m], a, b, sums[m]);
            }
            __syncwarp();
        }
    }
    float* results = shared->results[warp];
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
        wmma::store_matrix_sync(results, sums[m], 16, wmma::mem_row_major);
        __syncwarp();
        for (int i = lane; i < 256; i += kWarp) {
            const int row = m * 16 + i / 16;
            if (row < group.count) {
                const size_t at = (size_t)job.work.sorted_slots[group.first + row] * job.projections + projection;
                job.sums[at * job.n + tile * 16 + i % 16] = results[i];
            }
        }
        __syncwarp();
    }
}
#define DS41_SHARED                                               \
    __shared__ __align__(32) unsigned char bytes[sizeof(Shared)]; \
    Shared* shared = reinterpret_cast<Shared*>(bytes)
#define DS41_BOUNDS __launch_bounds__(kThreads, 2)
#endif

template <int CB>
DEVICE void multiply(const Product& job) {
    DS41_SHARED;
    Group group;
    if (!take_group(job.work, group)) return;
    const int projection = blockIdx.z;
    const Linear linear = job.linears[group.expert * 3 + job.first_projection + projection];
    switch (linear.bits) {
#define DS41_CASE(K)                                                     \
    case K:                                                              \
        if constexpr ((DS41_K_MASK >> K) & 1) {                          \
            if (group.count <= 16)                                       \
                strip<K, CB, 1>(job, linear, group, projection, shared); \
            else if (group.count <= 32)                                  \
                strip<K, CB, 2>(job, linear, group, projection, shared); \
            else                                                         \
                strip<K, CB, 4>(job, linear, group, projection, shared); \
        }                                                                \
        break;
        DS41_EACH_K(DS41_CASE)
#undef DS41_CASE
    }
}

constexpr int kRouteThreads = 1024;
extern "C" __global__ void __launch_bounds__(kRouteThreads)
    exl3_route(const int* ids, int slots, int experts, int group_rows, WorkList work) {
    __shared__ u16 counts[kRouteThreads / kWarp * kMaxExperts];
    __shared__ int starts[kMaxExperts];
    build_work_list(ids, slots, experts, group_rows, work, counts, starts);
}

// CTA (slot, projection) as in decode, with rows in the natural order of k.
extern "C" __global__ void __launch_bounds__(kStageThreads)
    exl3_prefill_prepare(const half* x, const int* ids, const Linear* linears, int slots, int top_k, int experts,
                         int hidden, unsigned char* acts) {
    const int slot = blockIdx.x / 2, projection = blockIdx.x % 2, expert = __ldg(ids + slot);
    if (expert < 0 || expert >= experts) return;
    const size_t row = blockIdx.x;
    rotate_row<kHalfRows>(x + (size_t)(slot / top_k) * hidden, linears[expert * 3 + projection].suh, hidden,
                          acts + row * hidden * 2, nullptr);
}

extern "C" __global__ void __launch_bounds__(kStageThreads)
    exl3_prefill_middle(const float* sums, const int* ids, const Linear* linears, int experts, int inter, float limit,
                        unsigned char* acts) {
    middle<kHalfRows>(sums, ids, linears, experts, inter, limit, acts, nullptr);
}

#if DS41_CODEBOOK_MASK & 1
extern "C" __global__ void DS41_BOUNDS exl3_prefill_multiply_3inst(Product job) {
    multiply<kThreeInst>(job);
}
#endif
#if DS41_CODEBOOK_MASK & 2
extern "C" __global__ void DS41_BOUNDS exl3_prefill_multiply_mcg(Product job) {
    multiply<kMcg>(job);
}
#endif
#if DS41_CODEBOOK_MASK & 4
extern "C" __global__ void DS41_BOUNDS exl3_prefill_multiply_mul1(Product job) {
    multiply<kMul1>(job);
}
#endif
