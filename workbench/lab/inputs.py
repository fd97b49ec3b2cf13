"""The study's inputs: S and dO in the operands' type, and the fp32 reference for dV = S^T dO."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_DTYPES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "tf32": torch.float32,
}
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
DISTRIBUTIONS = {
    "random": "S uniform in [0, 1), dO normal with deviation 1/2, rounded to the type",
    "integer": "S and dO integers, uniform in -8..8",
}
"""What --data may be, in words."""
_LARGEST_INTEGER = 8


@dataclass(frozen=True)
class Inputs:
    """S (k heads, m keys) and dO (k heads, n dims), row-major."""

    s: torch.Tensor
    do: torch.Tensor

    def bits(self) -> tuple[torch.Tensor, torch.Tensor]:
        """S and dO as unsigned integers, which the kernels move."""
        s, do = (x.view(_BITS[x.element_size()]) for x in (self.s, self.do))
        return s, do

    def reference(self, heads: slice = slice(None)) -> torch.Tensor:
        """dV (m, n) of some heads, by torch in fp32."""
        return self.s.float()[heads].T @ self.do.float()[heads]


def make_inputs(k: int, m: int, n: int, *, dtype: str, data: str, seed: int) -> Inputs:
    """Random inputs of one of DISTRIBUTIONS; the same seed gives the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    if data == "integer":
        low, high = -_LARGEST_INTEGER, _LARGEST_INTEGER + 1
        s = torch.randint(low, high, (k, m), generator=generator).float()
        do = torch.randint(low, high, (k, n), generator=generator).float()
    else:
        s = torch.rand(k, m, generator=generator)
        do = 0.5 * torch.randn(k, n, generator=generator)
    return Inputs(_rounded(s, dtype), _rounded(do, dtype))


def _rounded(values: torch.Tensor, dtype: str) -> torch.Tensor:
    if dtype != "tf32":
        return values.to(_DTYPES[dtype])
    bits = values.view(torch.int32)  # tf32 is f32 with 10 bits of mantissa, here to nearest even
    bits = bits + 0xFFF + (bits >> 13 & 1)
    return (bits & ~0x1FFF).view(torch.float32)
