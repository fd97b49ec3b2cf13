"""Sparse MLA cases: what each one is about, and the inputs that it stands for."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashdsa import reference
from flashdsa.reference import valid_slots
from flashdsa.verify.layouts import strided_copy

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
NAN_BYTE = 0x7F
"""NaN in e4m3; four of them are 3.4e38 in fp32 and two so in bf16: the largest numbers, and NaN."""


def invalid_values(num_keys: int) -> list[int]:
    """Index values that name no kv row."""
    return [-1, num_keys, INT32_MIN, num_keys + 7, INT32_MAX, -2]


def length_values(topk: int) -> list[int]:
    """Values of topk_length, inside and outside [0, topk]."""
    return [max(1, topk // 2), 0, topk, -5, topk + 9, 1, INT32_MAX, INT32_MIN]


@dataclass(frozen=True)
class SparseMlaCase:
    """Dimensions and features of one call; data are standard normal unless a field says else."""

    name: str
    num_queries: int
    num_keys: int
    num_heads: int
    topk: int
    d_qk: int = 576
    d_v: int = 512
    dtype: torch.dtype = torch.bfloat16
    sm_scale: float | None = None
    duplicates: bool = False
    """Slots name few rows, each many times."""
    invalid: bool = False
    """About a third of the slots hold `invalid_values`."""
    empty_rows: bool = False
    """Every third query, from the first on, has no valid slot."""
    topk_length: bool = False
    """Lengths go round `length_values`."""
    max_logits: bool = False
    """The forward is asked for its largest logits, too."""
    attn_sink: str | None = None
    """None, "finite" (near the lse, so that it matters) or "infinite" (+inf, -inf, finite, ...)."""
    logit_scale: float = 1.0
    """Logits spread over about [-logit_scale, logit_scale] where it is not 1."""
    logit_shift: float = 0.0
    """Every logit is near this."""
    rounded_dots: bool = False
    """False: where logits are large, q and kv lie on a grid that makes dot products exact in fp32
    in any order, so that what is judged is the softmax.  True: they are any values."""
    from_exact_o: bool = False
    """Gradients of the whole chain are judged besides: against float64 from the unrounded O."""
    poison: bool = False
    """kv rows that no valid slot names hold NaN, +inf and -inf; rows 0 and S_kv - 1, where clamped
    and wrapped indices land, are among them, and slots past topk_length name them."""
    nan_row: bool = False
    """A row holds NaN that one query names: no other query's results may show it."""
    strided: bool = False
    kv_3d: bool = False
    packed: str = ""
    """kv has packed rows, with scales of this kind: "ue8m0" or "fp32"."""
    page_size: int = 0
    """kv has pages of so many rows, where it is not 0; num_keys is a multiple of it."""
    indices_3d: bool = False
    cancels: bool = False
    """dS all but vanishes (a single key, say), so norms of gradients say nothing; rows still do."""

    @property
    def judges_norms(self) -> bool:
        """Whether the contract's norm rule applies: standard-normal data, default scale."""
        plain = self.logit_scale == 1.0 and self.logit_shift == 0.0
        return plain and self.sm_scale is None and not self.cancels


@dataclass(frozen=True)
class SparseMlaInputs:
    """q `[S, H, d_qk]`, kv, indices, do (dO) `[S, H, d_v]`, and a case's optional operands."""

    case: SparseMlaCase
    q: Tensor
    kv: Tensor
    indices: Tensor
    do: Tensor
    topk_length: Tensor | None
    attn_sink: Tensor | None

    def to(self, device: str | torch.device) -> "SparseMlaInputs":
        """The same values on a device, laid out in the same way."""

        def move(x: Tensor) -> Tensor:
            return strided_copy(x.to(device)) if self.case.strided else x.to(device)

        if torch.device(device).type == self.q.device.type:
            return self
        return replace(
            self,
            q=move(self.q),
            kv=move(self.kv),
            indices=move(self.indices),
            do=move(self.do),
            topk_length=None if self.topk_length is None else self.topk_length.to(device),
            attn_sink=None if self.attn_sink is None else self.attn_sink.to(device),
        )

    @property
    def num_keys(self) -> int:
        """S_kv, over all pages."""
        return self.case.num_keys

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments common to forward and backward."""
        return {
            "sm_scale": self.case.sm_scale,
            "topk_length": self.topk_length,
            "attn_sink": self.attn_sink,
        }

    def lay_out(self, x: Tensor) -> Tensor:
        """x on the inputs' device, strided where the case says so."""
        x = x.to(self.q.device)
        return strided_copy(x) if self.case.strided else x


def _draw_indices(case: SparseMlaCase, lengths: list[int], generator: torch.Generator) -> Tensor:
    """int32 `[S, topk]`."""
    n, topk = case.num_keys, case.topk
    reserved = [0, n - 1] if case.poison and n >= 3 else []
    usable = torch.tensor([row for row in range(n) if row not in reserved], dtype=torch.int64)
    bad = torch.tensor(invalid_values(n), dtype=torch.int64)
    table = torch.full((case.num_queries, topk), -1, dtype=torch.int64)
    for s in range(case.num_queries):
        if len(usable) and case.duplicates:
            pool = usable[torch.randperm(len(usable), generator=generator)][: len(usable) // 4 + 1]
            table[s] = pool[torch.randint(len(pool), (topk,), generator=generator)]
        elif len(usable):
            rows = usable[torch.randperm(len(usable), generator=generator)][:topk]
            table[s, : len(rows)] = rows
        if case.invalid or (case.empty_rows and s % 3 == 0):
            replaced = torch.rand(topk, generator=generator) < 0.3
            if case.empty_rows and s % 3 == 0:
                replaced[:] = True
            drawn = torch.randint(len(bad), (topk,), generator=generator)
            table[s] = torch.where(replaced, bad[drawn], table[s])
        if reserved:
            beyond = torch.arange(topk) >= lengths[s]
            table[s] = torch.where(beyond, torch.tensor(reserved)[torch.arange(topk) % 2], table[s])
    return table.to(torch.int32)


def _plant_nan_row(kv: Tensor, indices: Tensor) -> None:
    """NaN in the middle row, which the middle query's first slot names, and no other slot."""
    row, query = len(kv) // 2, len(indices) // 2
    indices[indices == row] = -1
    indices[query, 0] = row
    kv[row] = torch.nan


def _draw_sink(case: SparseMlaCase, generator: torch.Generator) -> Tensor | None:
    if case.attn_sink is None:
        return None
    sink = torch.randn(case.num_heads, generator=generator) + math.log(case.topk) + case.logit_shift
    if case.attn_sink == "infinite":
        sink[0::3], sink[1::3] = torch.inf, -torch.inf
    return sink


def _packed_rows(kv: Tensor, scale: str) -> Tensor:
    """Rows (S_kv, 576) as packed ones; a row that is not finite has such bytes everywhere."""
    packed = reference.quantize_kv(kv, scale)
    packed[~kv.isfinite().all(dim=1)] = NAN_BYTE
    return packed


def make_sparse_mla_inputs(
    case: SparseMlaCase, seed: int, device: str | torch.device = "cpu"
) -> SparseMlaInputs:
    """The inputs of one case; the same (case, seed) gives the same values on every device."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q = normal(case.num_queries, case.num_heads, case.d_qk)
    kv = normal(case.num_keys, case.d_qk)
    do = normal(case.num_queries, case.num_heads, case.d_v)
    if case.logit_scale != 1.0:
        q = q * (case.logit_scale / 3)  # a default logit is N(0, 1): 3 sigma reach the scale
    if (case.logit_scale != 1.0 or case.logit_shift != 0.0) and not case.rounded_dots:
        # Multiples of 1/4 times multiples of q_step, 8 bits each: sums stay below 2^24 steps.
        q_step = 2.0 ** math.floor(math.log2(max(case.logit_scale / 3, 1))) / 32
        q_step = max(q_step, 0.25)
        q, kv = (q / q_step).round() * q_step, (kv * 4).round() / 4
    if case.logit_shift != 0.0:
        wanted = abs(case.logit_shift) * math.sqrt(case.d_qk)
        q[..., -1] = math.copysign(2.0 ** round(math.log2(wanted)), case.logit_shift)
        kv[..., -1] = 1.0

    values = length_values(case.topk)
    lengths = [values[s % len(values)] for s in range(case.num_queries)]
    if not case.topk_length:
        lengths = [case.topk] * case.num_queries
    indices = _draw_indices(case, lengths, generator)
    topk_length = torch.tensor(lengths, dtype=torch.int32) if case.topk_length else None
    sink = _draw_sink(case, generator)

    if case.nan_row:
        _plant_nan_row(kv, indices)
    if case.poison:
        named = {r for rows in valid_slots(indices, case.num_keys, topk_length) for r in rows}
        poisons = (torch.nan, torch.inf, -torch.inf)
        for row in range(case.num_keys):
            if row not in named:
                kv[row] = poisons[row % 3]

    if case.empty_rows or case.poison:
        for s, rows in enumerate(valid_slots(indices, case.num_keys, topk_length)):
            if not rows:  # such a query's dQ is 0, whatever dO holds
                do[s] = (torch.inf, torch.nan)[s % 2]

    def finish(x: Tensor, dtype: torch.dtype) -> Tensor:
        x = x.to(device=device, dtype=dtype)
        return strided_copy(x) if case.strided else x

    keys = _packed_rows(kv, case.packed) if case.packed else kv.to(case.dtype)
    if case.page_size:
        keys = keys.view(-1, case.page_size, keys.shape[-1])
    return SparseMlaInputs(
        case=case,
        q=finish(q, case.dtype),
        kv=finish(keys[:, None, :] if case.kv_3d else keys, keys.dtype),
        indices=finish(indices[:, None, :] if case.indices_3d else indices, torch.int32),
        do=finish(do, case.dtype),
        topk_length=None if topk_length is None else topk_length.to(device),
        attn_sink=None if sink is None else sink.to(device),
    )


_ALL_FEATURES: dict[str, Any] = {
    "duplicates": True,
    "invalid": True,
    "empty_rows": True,
    "topk_length": True,
    "attn_sink": "infinite",
    "poison": True,
    "strided": True,
    "kv_3d": True,
    "indices_3d": True,
}
_FP32, _FP64 = torch.float32, torch.float64

# fmt: off
SPARSE_MLA_CASES: list[SparseMlaCase] = [
    # name, S, S_kv, H, topk
    SparseMlaCase("plain", 5, 300, 64, 128),
    SparseMlaCase("model sizes", 2, 4096, 128, 2048),
    SparseMlaCase("odd sizes", 3, 77, 3, 33),
    SparseMlaCase("one slot, one head", 3, 9, 1, 1, cancels=True),
    SparseMlaCase("more slots than keys", 3, 20, 4, 64),
    SparseMlaCase("more slots than keys, duplicates", 3, 20, 4, 64, duplicates=True),
    SparseMlaCase("duplicates", 4, 64, 16, 96, duplicates=True),
    SparseMlaCase("invalid indices", 5, 200, 16, 64, invalid=True),
    SparseMlaCase("rows without a valid slot", 5, 100, 8, 48, empty_rows=True),
    SparseMlaCase("no row has a valid slot", 1, 50, 8, 40, empty_rows=True),
    SparseMlaCase("topk_length", 9, 128, 8, 40, topk_length=True),
    SparseMlaCase("poisoned rows", 4, 150, 16, 64, invalid=True, poison=True),
    SparseMlaCase("poisoned rows past topk_length", 9, 100, 8, 40, topk_length=True, poison=True),
    SparseMlaCase("a NaN row that one query names", 5, 60, 16, 24, nan_row=True),
    SparseMlaCase("sink", 5, 120, 16, 64, attn_sink="finite"),
    SparseMlaCase("infinite sinks", 5, 120, 16, 64, attn_sink="infinite", empty_rows=True),
    SparseMlaCase("sinks on rows without a valid slot", 4, 30, 3, 16, attn_sink="infinite",
                  empty_rows=True, topk_length=True),
    SparseMlaCase("logits to 1e4", 6, 500, 32, 128, logit_scale=1e4),
    SparseMlaCase("logits to 1e4, rounded dots", 6, 500, 32, 128, logit_scale=1e4,
                  rounded_dots=True),
    SparseMlaCase("logits near +1e4", 6, 500, 32, 128, logit_shift=1e4),
    SparseMlaCase("logits near -1e4", 6, 500, 32, 128, logit_shift=-1e4),
    SparseMlaCase("logits near -1e4, sink", 5, 150, 16, 64, logit_shift=-1e4, attn_sink="finite"),
    SparseMlaCase("scale 0", 3, 90, 8, 32, sm_scale=0.0),
    SparseMlaCase("scale 0.3", 3, 90, 8, 32, sm_scale=0.3),
    SparseMlaCase("strided", 4, 90, 8, 48, strided=True),
    SparseMlaCase("3-D kv and indices", 4, 90, 8, 48, kv_3d=True, indices_3d=True),
    SparseMlaCase("one key", 2, 1, 4, 5, duplicates=True, cancels=True),
    SparseMlaCase("no key", 2, 0, 4, 5),
    SparseMlaCase("no query", 0, 10, 4, 5),
    # Beyond what any backend works on at once: several key blocks a query, several query tiles.
    SparseMlaCase("5000 slots", 3, 3000, 4, 5000, duplicates=True, d_qk=72, d_v=64),
    SparseMlaCase("5000 slots, every feature", 6, 3000, 4, 5000, d_qk=72, d_v=64, **_ALL_FEATURES),
    SparseMlaCase("450 queries", 450, 300, 4, 64, topk_length=True, attn_sink="finite"),
    SparseMlaCase("every feature", 10, 130, 16, 70, **_ALL_FEATURES),
    SparseMlaCase("largest logits", 6, 130, 16, 70, max_logits=True, **_ALL_FEATURES),
    SparseMlaCase("largest logits to 1e4", 6, 500, 32, 128, max_logits=True, logit_scale=1e4),
    SparseMlaCase("small dims", 4, 40, 5, 24, d_qk=24, d_v=16),
    SparseMlaCase("d_qk = d_v + 1", 4, 40, 5, 24, d_qk=17, d_v=16),
    SparseMlaCase("fp32", 4, 150, 16, 96, dtype=_FP32),
    SparseMlaCase("fp32, every feature", 10, 130, 6, 70, dtype=_FP32, **_ALL_FEATURES),
    SparseMlaCase("fp32, small dims, sink", 6, 40, 5, 24, d_qk=24, d_v=16, dtype=_FP32,
                  attn_sink="finite"),
    SparseMlaCase("fp64", 4, 150, 16, 96, dtype=_FP64),
    SparseMlaCase("fp64, every feature", 10, 130, 6, 70, dtype=_FP64, **_ALL_FEATURES),
    SparseMlaCase("fp64, logits to 1e4", 5, 150, 16, 64, dtype=_FP64, logit_scale=1e4),
    SparseMlaCase("fp64, largest logits", 4, 150, 4, 96, dtype=_FP64, max_logits=True,
                  sm_scale=-0.3, empty_rows=True),
]
PACKED_CASES: list[SparseMlaCase] = [
    # name, S, S_kv, H, topk: packed rows, of which there is no backward
    SparseMlaCase("packed", 5, 300, 64, 128, packed="ue8m0"),
    SparseMlaCase("packed, any scale", 5, 300, 64, 128, packed="fp32"),
    SparseMlaCase("packed, 8 heads", 4, 200, 8, 130, packed="ue8m0", invalid=True),
    SparseMlaCase("packed, 128 heads", 2, 2300, 128, 2048, packed="ue8m0", invalid=True),
    SparseMlaCase("packed pages", 4, 256, 16, 96, packed="ue8m0", page_size=64, duplicates=True),
    SparseMlaCase("packed, one slot", 3, 9, 16, 1, packed="ue8m0", cancels=True),
    SparseMlaCase("packed, poisoned rows", 9, 150, 16, 64, packed="fp32", invalid=True,
                  topk_length=True, poison=True, empty_rows=True),
    SparseMlaCase("packed, infinite sinks", 5, 120, 32, 64, packed="ue8m0", attn_sink="infinite",
                  empty_rows=True),
    SparseMlaCase("packed, logits to 1e4", 6, 500, 32, 128, packed="ue8m0", logit_scale=1e4),
    SparseMlaCase("packed, 3-D", 4, 90, 8, 48, packed="fp32", kv_3d=True, indices_3d=True),
    SparseMlaCase("packed, strided", 4, 90, 8, 48, packed="ue8m0", strided=True),
    SparseMlaCase("packed, no key", 2, 0, 16, 5, packed="ue8m0"),
    SparseMlaCase("packed, odd sizes", 3, 77, 3, 33, packed="fp32"),
    SparseMlaCase("pages", 4, 256, 16, 96, page_size=64, duplicates=True, invalid=True),
]
# fmt: on
