"""Classes of kernels by the names that libraries give them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from playbook.kernels import CLASSES, OTHER, kernel_class
from playbook.paths import repo_root

NAMES = {
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NTT": "products",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>(Params)": "products",
    "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize32x32x8": "products",
    "aten::addmm": "products",
    "aten::mm": "products",
    "_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalINS1_17GroupProblemShapeIN4cute5tupleIJiii": "grouped products",
    "aten::_grouped_mm": "grouped products",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16": "attention",
    "void (anonymous namespace)::softmax_warp_forward<float>": "elementwise",
    "at::native::(anonymous namespace)::fill_reverse_indices_kernel(long*, int)": "elementwise",
    "void transformer_engine::normalization::rmsnorm_fwd_general_kernel": "elementwise",
    "triton_poi_fused__to_copy_add_cat_mul_rsub_sigmoid_silu_split_0": "elementwise",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy": "elementwise",
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage)": "collectives",
    "void deep_ep::intranode::dispatch<8>": "collectives",
    "Memcpy DtoD (Device -> Device)": "copies",
    "my_secret_kernel": OTHER,
    # AOTriton's, by their bare names.
    "attn_fwd": "attention",
    "attn_fwd_compressed": "attention",
    "bwd_kernel_dk_dv": "attention",
    "bwd_kernel_dq": "attention",
    "bwd_preprocess": "attention",
    "_attn_bwd_dkdv": "attention",
    # cuDNN's and MIOpen's.
    "void bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>(cudnnTensorStruct, float const*)": "elementwise",
    "void cudnn::bn_bw_1C11_kernel_new<__half, float, float2, 512, true, 1>(float, float)": "elementwise",
    "volta_scudnn_128x64_relu_interior_nn_v1": "products",
    "turing_fp16_s1688cudnn_fp16_128x128_ldg8_relu_f2f_exp_small_nhwc_tn_v1": "products",
    "void nchwToNhwcKernel<__half, __half, float, true, false, (cudnnKernelDataType_t)0>(cudnn::nchw2nhwc_params_t<float>)": "elementwise",
    "void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1, false>(int, int)": "products",
    "MIOpenBatchNormFwdTrainSpatial": "elementwise",
    "miopenSp3AsmConv_v30_3_1_gfx9_fp16_dot2_f2x3_stride1": "products",
    "SubTensorOpWithScalar1d": "elementwise",
    # Names whose first bracket stands in a template parameter.
    "void ck_tile::kentry<(int)256, (int)2, ck_tile::FmhaFwdKernel<ck_tile::BlockFmhaPipeline<(int)1>>>(Args)": "attention",
    "void cutlass::device_kernel<(anonymous namespace)::GemmUniversal<cute::tuple<(int)1>>>(Params)": "products",
    "void (anonymous namespace)::kernel<(bool)1, gemm::Tile>(int)": "products",
    "void at::native::vectorized_elementwise_kernel<(int)4, at::native::sdpa_scale(float)::{lambda()#1}>(int)": "elementwise",
    "void other_kernel<(int)4>(flash::Params)": OTHER,
}


@pytest.mark.parametrize("name", NAMES)
def test_kernels_have_the_class_that_their_names_say(name: str) -> None:
    assert kernel_class(name) == NAMES[name]


def kernels_in(record: object) -> Iterator[str]:
    """Names below any key `kernels` of a record."""
    for key, value in record.items() if isinstance(record, dict) else enumerate(record) if isinstance(record, list) else ():
        yield from value if key == "kernels" and isinstance(value, dict) else kernels_in(value)


def test_hardly_a_kernel_of_our_records_has_no_class() -> None:
    records = [path for path in sorted((repo_root() / "bench/results").glob("h200*/*.json")) if '"kernels"' in path.read_text()]
    names = {name for path in records[-20:] for name in kernels_in(json.loads(path.read_text()))}
    unknown = {name for name in names if kernel_class(name) == OTHER}
    assert len(names) > 100
    assert len(unknown) < 0.05 * len(names), unknown
    assert {kernel_class(name) for name in names} <= {kind for kind, _ in CLASSES} | {OTHER}
