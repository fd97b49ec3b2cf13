"""Cases of compressed entries: lengths of packed sequences, and what is planted in their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashdsa.verify.layouts import strided_copy


@dataclass(frozen=True)
class EntriesCase:
    """One call; kv, gates, biases and gradients are normal numbers.

    Tokens and columns that no entry pools hold NaN, and so do gradients of rows without an entry.
    """

    name: str
    lengths: tuple[int, ...]
    """Tokens of each sequence."""
    ratio: int
    d: int = 512
    overlap: bool = False
    ape: bool = True
    norm: bool = True
    rotated: int = 64
    """Last columns that are rotated; 0: none."""
    dtype: torch.dtype = torch.bfloat16
    gate_scale: float = 1.0
    own_dtype: bool = False
    """`ape` and the norm's weight have kv's dtype."""
    strided: bool = False
    """kv and gates are parts of one projection."""
    padding: int = 0
    """Rows after the last sequence's."""

    @property
    def tokens(self) -> int:
        """T, rows of kv."""
        return sum(self.lengths) + self.padding


@dataclass(frozen=True)
class EntriesInputs:
    """kv, gate (T, width), grad_entries (T // ratio, d), ape (ratio, width), norm_weight (d,)."""

    case: EntriesCase
    kv: Tensor
    gate: Tensor
    grad_entries: Tensor
    ape: Tensor | None
    norm_weight: Tensor | None
    rotation: tuple[Tensor, Tensor] | None
    cu_seqlens: Tensor

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Operands in the order of `compress_kv`."""
        return self.kv, self.gate, self.ape

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments, of the reference too but for `cu_seqlens`."""
        return {
            "ratio": self.case.ratio,
            "overlap": self.case.overlap,
            "norm_weight": self.norm_weight,
            "rotation": self.rotation,
        }


def make_entries_inputs(
    case: EntriesCase, seed: int, device: str | torch.device = "cpu"
) -> EntriesInputs:
    """The inputs of one case; the same (case, seed) gives the same values on every device."""
    generator = torch.Generator().manual_seed(seed)
    d, ratio = case.d, case.ratio
    width = d * (1 + case.overlap)
    sums = torch.float64 if case.dtype == torch.float64 else torch.float32
    weights = case.dtype if case.own_dtype else sums

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    kv, gate = normal(case.tokens, width), normal(case.tokens, width) * case.gate_scale
    offsets, entries = [0], 0
    for length in case.lengths:
        first, end = offsets[-1], offsets[-1] + length
        complete = length // ratio * ratio
        kv[first + complete : end] = gate[first + complete : end] = torch.nan
        if case.overlap and complete:
            last = slice(first + complete - ratio, first + complete)
            kv[last, :d] = gate[last, :d] = torch.nan
        offsets.append(end)
        entries += length // ratio
    kv[offsets[-1] :] = gate[offsets[-1] :] = torch.nan
    grad = normal(case.tokens // ratio, d)
    grad[entries:] = torch.nan
    positions = max(case.lengths, default=0) + 1
    angles = 6.3 * torch.rand(positions, case.rotated // 2, generator=generator)
    tables = angles.double().cos(), angles.double().sin()

    def lay_out(x: Tensor, dtype: torch.dtype) -> Tensor:
        x = x.to(device=device, dtype=dtype)
        return strided_copy(x) if case.strided else x

    return EntriesInputs(
        case,
        lay_out(kv, case.dtype),
        lay_out(gate, case.dtype),
        grad.to(device=device, dtype=case.dtype),
        normal(ratio, width).to(device=device, dtype=weights) if case.ape else None,
        normal(d).to(device=device, dtype=weights) if case.norm else None,
        (tables[0].to(device, sums), tables[1].to(device, sums)) if case.rotated else None,
        torch.tensor(offsets, dtype=torch.int32, device=device),
    )


_BF16, _FP16, _FP32, _FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

ENTRIES_CASES = [
    EntriesCase("CSA, 5 sequences", (9, 3, 0, 17, 24), 4, overlap=True),
    EntriesCase("CSA index keys", (130, 7), 4, 128, overlap=True, strided=True),
    EntriesCase("HCA", (128, 300, 127), 128),
    EntriesCase("V4.1, ratio 2", (7, 1, 32), 2, ape=False),
    EntriesCase("pools of 4 without norm and rotation", (6, 33), 4, 128, norm=False, rotated=0),
    EntriesCase("padded batch, CSA", (21,), 4, overlap=True, padding=43),
    EntriesCase("padded batch, CSA, 4 sequences", (9, 3, 0, 17), 4, overlap=True, padding=35),
    EntriesCase("padded batch, CSA index keys", (22,), 4, 128, overlap=True, padding=300),
    EntriesCase("padded batch, HCA", (300,), 128, padding=212),
    EntriesCase("padded batch, HCA, 2 sequences", (128, 200), 128, padding=184),
    EntriesCase("padded batch, V4.1", (7,), 2, ape=False, padding=25),
    EntriesCase("padded batch, pools of 4", (33,), 4, 128, norm=False, rotated=0, padding=31),
    EntriesCase("no token but padding", (0, 0), 4, overlap=True, padding=40),
    EntriesCase("no entry", (3, 2, 3), 4, overlap=True),
    EntriesCase("large gates", (40,), 4, overlap=True, gate_scale=300.0),
    EntriesCase("weights in bf16", (21,), 4, 128, overlap=True, own_dtype=True),
    EntriesCase("ratio 1", (5,), 1, 24, ape=False, rotated=8),
    EntriesCase("fp16", (30, 9), 4, 64, overlap=True, dtype=_FP16),
    EntriesCase("fp32, 257 tokens, ratio 128", (257,), 128, 64, dtype=_FP32),
    EntriesCase("fp32, 7 columns", (22, 4), 3, 7, rotated=4, dtype=_FP32, strided=True),
    EntriesCase("fp64", (30, 3), 4, 24, overlap=True, rotated=8, dtype=_FP64),
]
"""Cases that every backend with these operations runs, `flashdsa check` too."""
