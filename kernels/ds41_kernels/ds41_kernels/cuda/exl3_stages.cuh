// The stages of an EXL3 mixture-of-experts layer around the matrix products: work list, input rotation, SwiGLU between
// the projections, output rotation and weighted sum. Every reduction has a fixed order; nothing is added atomically.
#pragma once
#include "exl3_format.cuh"

constexpr int kStageThreads = 512;
constexpr int kStageWarps = kStageThreads / kWarp;
constexpr int kMaxBlocks = 4;  // 128-wide blocks of one row held by one warp: rows up to 4 * 16 * 128 = 8192 values
constexpr int kFinishThreads = 64;
constexpr int kSlotsAtOnce = 8;

// Rows of one expert that are worked on together. `first` counts in the sorted slots.
struct Group {
    int expert, first, count, reserved;
};

struct WorkList {
    int* groups_used;   // [1]
    Group* groups;      // [worst case]
    int* sorted_slots;  // [tokens * top_k], slots of one expert side by side and ascending
};

// Rotated activations in 16-value k-tiles of 32 bytes each, in the order of a lane's weights:
//   fp16:   [q][4 halves]  values k = 2q, 2q+1, 2q+8, 2q+9
//   fixed:  [plane][q][4 bytes], plane 0 the high byte, plane 1 the low byte of a 16-bit fixed-point number
enum ActivationFormat { kHalfQuads = 0, kFixedPlanes = 1, kHalfRows = 2 };

// Of one rotated row in fixed point: value = scale * integer, and the sum of its integers.
struct RowScale {
    float scale;
    int sum;
};

constexpr float kFixedLimit = 32512.f;  // 127 * 256: both planes stay within a signed byte

constexpr int kMaxExperts = 512;

// Builds the work list with one CTA: a stable counting sort, every warp with its own stretch of slots. Shared memory:
// `counts` for warps * experts numbers, `starts` for the experts. Slots whose expert is not in 0..experts-1 belong to
// another rank and are left out.
DEVICE void build_work_list(const int* __restrict__ ids, int slots, int experts, int group_rows, const WorkList& work,
                            u16* counts, int* starts) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    const int stretch = ((slots + warps - 1) / warps + kWarp - 1) / kWarp * kWarp;
    const int begin = warp * stretch, end = min(slots, begin + stretch);
    u16* own = counts + warp * experts;
    for (int i = threadIdx.x; i < warps * experts; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    for (int base = begin; base < end; base += kWarp) {
        const int slot = base + lane;
        int expert = slot < end ? __ldg(ids + slot) : -1;
        if (expert >= experts) expert = -1;
        const u32 same = __match_any_sync(0xffffffffu, expert);
        if (expert >= 0 && lane == __ffs(same) - 1) own[expert] += __popc(same);
        __syncwarp();
    }
    __syncthreads();
    for (int expert = threadIdx.x; expert < experts; expert += blockDim.x) {
        int rows = 0;
        for (int w = 0; w < warps; ++w) {
            const int found = counts[w * experts + expert];
            counts[w * experts + expert] = (u16)rows;
            rows += found;
        }
        starts[expert] = rows;
    }
    __syncthreads();
    if (warp == 0) {
        int rows_before = 0, groups_before = 0;
        for (int base = 0; base < experts; base += kWarp) {
            const int expert = base + lane, rows = expert < experts ? starts[expert] : 0;
            const int groups = (rows + group_rows - 1) / group_rows;
            int rows_to = rows, groups_to = groups;
            for (int step = 1; step < kWarp; step <<= 1) {
                const int r = __shfl_up_sync(0xffffffffu, rows_to, step),
                          g = __shfl_up_sync(0xffffffffu, groups_to, step);
                if (lane >= step) rows_to += r, groups_to += g;
            }
            const int first = rows_before + rows_to - rows;
            if (expert < experts) starts[expert] = first;
            for (int g = 0; g < groups; ++g) {
                const Group group = {expert, first + g * group_rows, min(group_rows, rows - g * group_rows), 0};
                work.groups[groups_before + groups_to - groups + g] = group;
            }
            rows_before += __shfl_sync(0xffffffffu, rows_to, kWarp - 1);
            groups_before += __shfl_sync(0xffffffffu, groups_to, kWarp - 1);
        }
        if (lane == 0) *work.groups_used = groups_before;
    }
    __syncthreads();
    for (int base = begin; base < end; base += kWarp) {
        const int slot = base + lane;
        int expert = slot < end ? __ldg(ids + slot) : -1;
        if (expert >= experts) expert = -1;
        const u32 same = __match_any_sync(0xffffffffu, expert);
        if (expert >= 0) work.sorted_slots[starts[expert] + own[expert] + __popc(same & ((1u << lane) - 1))] = slot;
        __syncwarp();
        if (expert >= 0 && lane == __ffs(same) - 1) own[expert] += __popc(same);
        __syncwarp();
    }
}

// Writes a row that the CTA holds (block b * kStageWarps + warp, value 4 * lane + j in rows[b][j], already rounded to
// fp16) in the wanted format. `row` is the row's 2 * width bytes.
template <int FORMAT>
DEVICE void store_row(const float (&rows)[kMaxBlocks][4], int width, unsigned char* row, RowScale* info) {
    __shared__ u32 largest_of[kStageWarps];
    __shared__ int sum_of[kStageWarps];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, blocks = width / 128;
    const int turns = (blocks + kStageWarps - 1) / kStageWarps;
    // value 4 * lane + j of a block: k-tile lane / 4, row r = 4 * (lane % 4) + j, quad (r % 8) / 2, upper pair if r >=
    // 8
    const int in_tile = lane % 4, quad = 2 * (in_tile % 2), upper = in_tile / 2;
    if constexpr (FORMAT != kFixedPlanes) {
#pragma unroll
        for (int b = 0; b < kMaxBlocks; ++b) {
            const int block = b * kStageWarps + warp;
            if (b >= turns) break;
            if (block >= blocks) continue;
            const half2 first = __floats2half2_rn(rows[b][0], rows[b][1]);
            const half2 second = __floats2half2_rn(rows[b][2], rows[b][3]);
            if constexpr (FORMAT == kHalfRows) {
                half2* at = reinterpret_cast<half2*>(row + ((size_t)block * 128 + 4 * lane) * 2);
                at[0] = first, at[1] = second;
            } else {
                unsigned char* tile = row + ((size_t)block * 8 + lane / 4) * 32;
                *reinterpret_cast<half2*>(tile + quad * 8 + upper * 4) = first;
                *reinterpret_cast<half2*>(tile + (quad + 1) * 8 + upper * 4) = second;
            }
        }
    } else {
        u32 bits = 0;
#pragma unroll
        for (int b = 0; b < kMaxBlocks; ++b)
            if (b * kStageWarps + warp < blocks)
                for (int j = 0; j < 4; ++j) bits = max(bits, __float_as_uint(rows[b][j]) & 0x7fffffffu);
        for (int step = kWarp / 2; step; step >>= 1) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, step));
        if (lane == 0) largest_of[warp] = bits;
        __syncthreads();
        bits = 0;
        for (int w = 0; w < kStageWarps; ++w) bits = max(bits, largest_of[w]);
        const float largest = __uint_as_float(bits);
        const float inverse = bits ? kFixedLimit / largest : 0.f;
        int sum = 0;
#pragma unroll
        for (int b = 0; b < kMaxBlocks; ++b) {
            const int block = b * kStageWarps + warp;
            if (b >= turns) break;
            if (block >= blocks) continue;
            int high[4], low[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int fixed = __float2int_rn(rows[b][j] * inverse);
                high[j] = (fixed + 128) >> 8;
                low[j] = fixed - 256 * high[j];
                sum += fixed;
            }
            unsigned char* tile = row + ((size_t)block * 8 + lane / 4) * 32;
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                unsigned char* at = tile + (quad + pair) * 4 + upper * 2;
                *reinterpret_cast<u16*>(at) = (u16)((high[2 * pair] & 255) | (high[2 * pair + 1] & 255) << 8);
                *reinterpret_cast<u16*>(at + 16) = (u16)((low[2 * pair] & 255) | (low[2 * pair + 1] & 255) << 8);
            }
        }
        for (int step = kWarp / 2; step; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (lane == 0) sum_of[warp] = sum;
        __syncthreads();
        if (threadIdx.x == 0) {
            int total = 0;
            for (int w = 0; w < kStageWarps; ++w) total += sum_of[w];
            // an infinite or NaN activation must show in the result, as it would in fp16
            const RowScale scale = {bits < 0x7f800000u ? largest / kFixedLimit : __uint_as_float(0x7fc00000u), total};
            *info = scale;
        }
    }
}

// had128(x * suh) of one row, x * suh and the result rounded to fp16 as EXL3 defines it.
template <int FORMAT>
DEVICE void rotate_row(const half* __restrict__ x, const half* __restrict__ suh, int width, unsigned char* row,
                       RowScale* info) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, blocks = width / 128;
    // all warps take the same number of turns, so that the shuffles are never inside a branch that divides a CTA; a
    // warp without a block of its own repeats the last one and does not store it
    const int turns = (blocks + kStageWarps - 1) / kStageWarps;
    float rows[kMaxBlocks][4];
#pragma unroll
    for (int b = 0; b < kMaxBlocks; ++b) {
        if (b < turns) {
            const int block = min(b * kStageWarps + warp, blocks - 1);
            const uint2 xs = __ldg(reinterpret_cast<const uint2*>(x + block * 128 + 4 * lane));
            const uint2 ss = __ldg(reinterpret_cast<const uint2*>(suh + block * 128 + 4 * lane));
            const half2 a = __hmul2(*reinterpret_cast<const half2*>(&xs.x), *reinterpret_cast<const half2*>(&ss.x));
            const half2 c = __hmul2(*reinterpret_cast<const half2*>(&xs.y), *reinterpret_cast<const half2*>(&ss.y));
            rows[b][0] = __low2float(a), rows[b][1] = __high2float(a);
            rows[b][2] = __low2float(c), rows[b][3] = __high2float(c);
            hadamard128(rows[b], lane);
            for (int j = 0; j < 4; ++j) rows[b][j] = __half2float(__float2half_rn(rows[b][j]));
        }
    }
    store_row<FORMAT>(rows, width, row, info);
}

// CTA (slot, projection): rotates the slot's token for gate (0) or up (1). The CTA behind the last one builds the work
// list.
template <int FORMAT>
DEVICE void prepare(const half* __restrict__ x, const int* __restrict__ ids, const Linear* __restrict__ linears,
                    int slots, int top_k, int experts, int hidden, int group_rows, unsigned char* acts, RowScale* infos,
                    const WorkList& work, u16* counts, int* starts) {
    if (blockIdx.x == 2 * slots) {
        build_work_list(ids, slots, experts, group_rows, work, counts, starts);
        return;
    }
    const int slot = blockIdx.x / 2, projection = blockIdx.x % 2, expert = __ldg(ids + slot);
    if (expert < 0 || expert >= experts) return;
    const size_t row = blockIdx.x;
    rotate_row<FORMAT>(x + (size_t)(slot / top_k) * hidden, linears[expert * 3 + projection].suh, hidden,
                       acts + row * hidden * 2, infos + row);
}

// CTA slot: from the sums of gate and up [slot][2][inter] to the rotated input of down.
//   gate = min(had(g) * svh_g, limit), up = clamp(had(u) * svh_u, -limit, limit), h = fp16(silu(gate) * up)
template <int FORMAT>
DEVICE void middle(const float* __restrict__ sums, const int* __restrict__ ids, const Linear* __restrict__ linears,
                   int experts, int inter, float limit, unsigned char* acts, RowScale* infos) {
    const int slot = blockIdx.x, expert = __ldg(ids + slot);
    if (expert < 0 || expert >= experts) return;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, blocks = inter / 128;
    const half* svh_gate = linears[expert * 3].svh;
    const half* svh_up = linears[expert * 3 + 1].svh;
    const half* suh = linears[expert * 3 + 2].suh;
    // all warps take the same number of turns, so that the shuffles are never inside a branch that divides a CTA; a
    // warp without a block of its own repeats the last one and does not store it
    const int turns = (blocks + kStageWarps - 1) / kStageWarps;
    float rows[kMaxBlocks][4];
#pragma unroll
    for (int b = 0; b < kMaxBlocks; ++b) {
        if (b < turns) {
            const int block = min(b * kStageWarps + warp, blocks - 1);
            const int at = block * 128 + 4 * lane;
            const float4 g4 = *reinterpret_cast<const float4*>(sums + (size_t)slot * 2 * inter + at);
            const float4 u4 = *reinterpret_cast<const float4*>(sums + ((size_t)slot * 2 + 1) * inter + at);
            float gate[4] = {g4.x, g4.y, g4.z, g4.w}, up[4] = {u4.x, u4.y, u4.z, u4.w};
            half scale_gate[4], scale_up[4], scale_down[4];
            *reinterpret_cast<uint2*>(scale_gate) = __ldg(reinterpret_cast<const uint2*>(svh_gate + at));
            *reinterpret_cast<uint2*>(scale_up) = __ldg(reinterpret_cast<const uint2*>(svh_up + at));
            *reinterpret_cast<uint2*>(scale_down) = __ldg(reinterpret_cast<const uint2*>(suh + at));
            hadamard128(gate, lane);
            hadamard128(up, lane);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float g = gate[j] * __half2float(scale_gate[j]), u = up[j] * __half2float(scale_up[j]);
                // comparisons that keep NaN
                g = g > limit ? limit : g;
                u = u > limit ? limit : (u < -limit ? -limit : u);
                const half h = __float2half_rn(g / (1.f + __expf(-g)) * u);
                rows[b][j] = __half2float(__hmul(h, scale_down[j]));
            }
            hadamard128(rows[b], lane);
            for (int j = 0; j < 4; ++j) rows[b][j] = __half2float(__float2half_rn(rows[b][j]));
        }
    }
    store_row<FORMAT>(rows, inter, acts + (size_t)slot * inter * 2, infos + slot);
}

// Warp (token, 128-wide block): out = scale * sum over the token's slots, in slot order, of weight * had(sum) * svh.
// Loads of up to eight slots are under way together; slots of other ranks add nothing.
DEVICE void finish(const float* __restrict__ sums, const int* __restrict__ ids, const float* __restrict__ weights,
                   const Linear* __restrict__ linears, int tokens, int top_k, int experts, int hidden, float scale,
                   float* __restrict__ out) {
    const int lane = threadIdx.x % kWarp, blocks = hidden / 128;
    const int item = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp;
    if (item >= tokens * blocks) return;
    const int token = item / blocks, at = (item % blocks) * 128 + 4 * lane;
    float total[4] = {0.f, 0.f, 0.f, 0.f};
    for (int begin = 0; begin < top_k; begin += kSlotsAtOnce) {
        const int mine = begin + lane, slot = token * top_k + mine;
        int expert = lane < kSlotsAtOnce && mine < top_k ? __ldg(ids + slot) : -1;
        if (expert >= experts) expert = -1;
        const float my_weight = expert >= 0 ? __ldg(weights + slot) : 0.f;
        const u64 my_svh = expert >= 0 ? reinterpret_cast<u64>(linears[expert * 3 + 2].svh) : 0;
        float4 sum[kSlotsAtOnce];
        uint2 svh[kSlotsAtOnce];
        float weight[kSlotsAtOnce];
        bool here[kSlotsAtOnce];
#pragma unroll
        for (int j = 0; j < kSlotsAtOnce; ++j) {
            const half* from = reinterpret_cast<const half*>(__shfl_sync(0xffffffffu, my_svh, j));
            weight[j] = __shfl_sync(0xffffffffu, my_weight, j);
            here[j] = from != nullptr;
            sum[j] = make_float4(0.f, 0.f, 0.f, 0.f), svh[j] = make_uint2(0, 0);
            if (here[j]) {
                sum[j] = *reinterpret_cast<const float4*>(sums + (size_t)(token * top_k + begin + j) * hidden + at);
                svh[j] = __ldg(reinterpret_cast<const uint2*>(from + at));
            }
        }
#pragma unroll
        for (int j = 0; j < kSlotsAtOnce; ++j) {
            if (here[j]) {  // the same for all lanes
                float y[4] = {sum[j].x, sum[j].y, sum[j].z, sum[j].w};
                hadamard128(y, lane);
                const half2 low = *reinterpret_cast<const half2*>(&svh[j].x);
                const half2 high = *reinterpret_cast<const half2*>(&svh[j].y);
                total[0] = fmaf(weight[j], y[0] * __low2float(low), total[0]);
                total[1] = fmaf(weight[j], y[1] * __high2float(low), total[1]);
                total[2] = fmaf(weight[j], y[2] * __low2float(high), total[2]);
                total[3] = fmaf(weight[j], y[3] * __high2float(high), total[3]);
            }
        }
    }
    *reinterpret_cast<float4*>(out + (size_t)token * hidden + at) =
        make_float4(scale * total[0], scale * total[1], scale * total[2], scale * total[3]);
}
