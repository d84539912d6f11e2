// What the decode and the prefill kernels share: which variants are built, and one matrix product's arguments.
#pragma once
#include "exl3_stages.cuh"

#ifndef DS41_K_MASK
#define DS41_K_MASK 0x1fe  // bit K: the kernels can decode K bits per weight
#endif
#ifndef DS41_CODEBOOK_MASK
#define DS41_CODEBOOK_MASK 7  // bit of each Codebook the kernels exist for
#endif

#define DS41_EACH_K(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8)

struct Product {
    const Linear* linears;      // [experts][3]
    const unsigned char* acts;  // [slot][projections][k * 2 bytes]
    const RowScale* infos;      // [slot][projections]
    float* sums;                // [slot][projections][n]
    WorkList work;
    int first_projection, projections, k, n;
};

// The group of this CTA (blockIdx.y); false when the grid is larger than the work. Both loads are under way together.
DEVICE bool take_group(const WorkList& work, Group& group) {
    const int used = *work.groups_used;
    const int4 entry = *reinterpret_cast<const int4*>(work.groups + blockIdx.y);
    group.expert = entry.x, group.first = entry.y, group.count = entry.z, group.reserved = 0;
    return blockIdx.y < used;
}

#if __CUDA_ARCH__ >= 800
DEVICE void copy16(u32 to, const void* from) {  // to: address in the shared window
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void copies_done() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int LEFT>
DEVICE void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
DEVICE void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#endif
