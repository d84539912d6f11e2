// Benchmark only, never shipped: Python names for exllamav3's two MoE functions (its headers and units are compiled from
// a directory of the user's), and empty stand-ins for the bit rates that are not built.
#include <torch/extension.h>

#include "quant/comp_units/exl3_moe_coop_instances.cuh"
#include "quant/comp_units/exl3_moe_instances.cuh"
#include "quant/exl3_moe.cuh"
#include "quant/exl3_moe_coop.cuh"

#define COOP(K)                                                                              \
    MoeCoopKernel exl3_moe_coop_kernel_a_k##K(int, int, bool) { return {nullptr, 0}; }       \
    MoeCoopKernel exl3_moe_coop_kernel_b_k##K(int, bool) { return {nullptr, 0}; }
#define COOP_HALF(K)                                                                         \
    MoeCoopKernel exl3_moe_coop_kernel_a_h##K(int, bool) { return {nullptr, 0}; }            \
    MoeCoopKernel exl3_moe_coop_kernel_b_h##K(bool) { return {nullptr, 0}; }
#define NONE(NAME) \
    fp_exl3_moe_kernel NAME() { return nullptr; }
#define MCG(K) NONE(exl3_moe_kernel_k##K##_n128_cb1) NONE(exl3_moe_kernel_k##K##_n256_cb1)
#define MUL1(K)                                                                              \
    NONE(exl3_moe_kernel_k##K##_n128_cb2) NONE(exl3_moe_kernel_k##K##_n256_cb2)              \
    NONE(exl3_moe_kernel_k##K##_n128_cb2_m32) NONE(exl3_moe_kernel_k##K##_n128_cb2_m64)
#define MUL1_HALF(K)                                                                         \
    NONE(exl3_moe_kernel_h##K##_n128_cb2) NONE(exl3_moe_kernel_h##K##_n256_cb2)              \
    NONE(exl3_moe_kernel_h##K##_n128_cb2_m32) NONE(exl3_moe_kernel_h##K##_n128_cb2_m64)

// K = 3 with mul1 is the one that is built
COOP(1) COOP(2) COOP(4) COOP(5) COOP(6) COOP(7) COOP(8)
COOP_HALF(1) COOP_HALF(2) COOP_HALF(3)
MCG(0) MCG(1) MCG(2) MCG(3) MCG(4) MCG(5) MCG(6) MCG(7) MCG(8)
MUL1(0) MUL1(1) MUL1(2) MUL1(4) MUL1(5) MUL1(6) MUL1(7) MUL1(8)
MUL1_HALF(1) MUL1_HALF(2) MUL1_HALF(3)

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    module.def("exl3_moe_coop", &exl3_moe_coop);
    module.def("exl3_moe", &exl3_moe);
    module.def("exl3_moe_max_concurrency", &exl3_moe_max_concurrency);
    module.def("ctr_len", &exl3_moe_coop_ctr_len);
}
