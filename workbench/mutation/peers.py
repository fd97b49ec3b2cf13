"""Kernels of other packages that workbench/mutation/kernels.py tries, and their launches."""

from __future__ import annotations

from workbench.mutation.scripts import Launches, scripted

_CUTLASS = "$CUTLASS/examples/python/CuTeDSL/cute"
_PEERS = "ptxemu/tests/peers/scripts"
_GEMM_SM100 = "--use_tma_store --ab_dtype Float16 --acc_dtype Float32 --skip_ref_check"
PEERS = {
    "cutlass-gemm-sm_90a": Launches(
        "Hopper",
        scripted(
            "sm_90a",
            f"{_CUTLASS}/hopper/kernel/dense_gemm/dense_gemm_persistent.py",
            *(
                f"--mnkl 512,256,{k},1 --cluster_shape_mn 2,1 --tile_shape_mn 128,128"
                for k in (512, 448, 128)
            ),
            sms=2,
        ),
    ),
    "cutlass-fmha-sm_90a": Launches(
        "Hopper",
        scripted(
            "sm_90a",
            f"{_CUTLASS}/hopper/kernel/attention/fmha.py",
            "--q_shape 1,256,1,128 --k_shape 1,768,1,128",
            sms=2,
        ),
    ),
    "cutlass-gemm-1cta-sm_100a": Launches(
        "Persistent",
        scripted(
            "sm_100a",
            f"{_CUTLASS}/blackwell/kernel/dense_gemm/dense_gemm_persistent.py",
            f"--mnkl 512,256,704,1 --mma_tiler_mn 128,128 {_GEMM_SM100}",
            sms=2,
        ),
    ),
    "cutlass-gemm-2cta-sm_100a": Launches(
        "Persistent",
        scripted(
            "sm_100a",
            f"{_CUTLASS}/blackwell/kernel/dense_gemm/dense_gemm_persistent.py",
            "--mnkl 1024,512,704,1 --mma_tiler_mn 256,128 --cluster_shape_mn 2,1 "
            f"--use_2cta_instrs {_GEMM_SM100}",
            sms=4,
        ),
    ),
    "quack-gemm-sm_90a": Launches(
        "quackgemm",
        scripted(
            "sm_90a",
            f"{_PEERS}/quack_kernel.py",
            "gemm 256 512 512",
            "gemm 384 768 448",
            "gemm 256 512 128",
            "gemm 256 512 256",  # fewer steps than stages: the loads of two tiles are in flight
            sms=2,
        ),
    ),
    "quack-gemm-sm_100a": Launches(
        "quackgemm",
        scripted(
            "sm_100a",
            f"{_PEERS}/quack_kernel.py",
            "gemm 512 1536 128",
            "gemm 512 512 704",
            sms=2,
        ),
    ),
    "cudnn-dsa-backward-sm_90a": Launches(
        "cudnn*.1",
        # Three blocks of keys; the kernel of another number has other PTX.
        scripted("sm_90a", f"{_PEERS}/dsa_backward.py", "64 2 256 192", sms=2),
    ),
    "cudnn-dsa-backward-h64-sm_100a": Launches(
        "bwd_cudnn",
        scripted("sm_100a", f"{_PEERS}/dsa_backward.py", "64 3 384 320", sms=2),
    ),
}
"""Of packages that `make test-peers` installs, and of CUTLASS; tried only if they are named."""
