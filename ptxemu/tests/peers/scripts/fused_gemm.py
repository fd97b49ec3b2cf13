"""cuDNN Frontend's matrix products with more in their epilogue (SM100) against torch.

swiglu: bf16, neighbouring 32 columns gate each other. amax: mxfp8 with block scales.
"""

import sys

import torch
from cudnn import gemm_amax_wrapper_sm100, gemm_swiglu_wrapper_sm100

M, N, K, BLOCK = 128, 256, 128, 32
generator = torch.Generator().manual_seed(0)


def operand(rows: int) -> torch.Tensor:
    """Normal numbers, (rows, k, 1)."""
    return torch.randn(rows, K, 1, generator=generator)


def swiglu() -> None:
    """Gated linear unit of a product."""
    a, b = operand(M).bfloat16().cuda(), operand(N).bfloat16().cuda()
    got = gemm_swiglu_wrapper_sm100(a, b, ab12_dtype=torch.float32, c_dtype=torch.bfloat16)
    product = a[..., 0].float() @ b[..., 0].float().T
    compare("ab12", got["ab12_tensor"][..., 0], product)
    value, gate = product.view(M, N // 64, 2, 32).unbind(2)
    compare("c", got["c_tensor"][..., 0], (value * torch.nn.functional.silu(gate)).reshape(M, -1))


def scales(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Powers of two a block of k: in rows, and as the tensor cores read them."""
    exponents = torch.randint(-2, 3, (rows, K // BLOCK), generator=generator)
    plain = torch.pow(2.0, exponents)
    # (row % 32, row / 32 % 4, row / 128, block % 4, block / 4, batch)
    tiles = plain.view(rows // 128, 4, 32, K // BLOCK // 4, 4, 1).permute(0, 3, 2, 1, 4, 5)
    packed = tiles.contiguous().to(torch.float8_e8m0fnu).permute(2, 3, 0, 4, 1, 5)
    return plain.repeat_interleave(BLOCK, 1), packed.cuda()


def amax() -> None:
    """Block-scaled product and its largest magnitude."""
    a, b = (operand(rows).to(torch.float8_e4m3fn).cuda() for rows in (M, N))
    (a_scale, sfa), (b_scale, sfb) = scales(M), scales(N)
    got = gemm_amax_wrapper_sm100(a, b, sfa, sfb)
    product = (a[..., 0].float() * a_scale) @ (b[..., 0].float() * b_scale).T
    compare("c", got["c_tensor"][..., 0], product)
    compare("amax", got["amax_tensor"].reshape(()), product.abs().max())


def compare(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert a small relative error."""
    error = ((got.float() - expected).norm() / expected.norm()).item()
    assert error < 4e-3, f"{name}: relative error {error:.2e}"


{"swiglu": swiglu, "amax": amax}[sys.argv[1]]()
