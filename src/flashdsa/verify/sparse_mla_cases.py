"""Sparse MLA cases: what each one is about, and the inputs that it stands for."""

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flashdsa import reference
from flashdsa.row_formats import ROW_FORMATS
from flashdsa.verify.draw_rows import draw_list, draw_sink, plant_nan_row, poison_rows
from flashdsa.verify.layouts import pages_apart, strided_copy

NAN_BYTE = 0x7F
"""NaN in e4m3; four of them are 3.4e38 in fp32 and two so in bf16: the largest numbers, and NaN."""

MANY = 2**21
"""Numbers that are drawn in fp32 where there are more: float64 takes four times as long."""


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
    row_sizes: float = 0.0
    """Rows of kv are exp of a normal number of that deviation as large."""
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
    kv_format: str = ""
    """Their format, where it is not "v32"; pages of it lie apart."""
    extra_format: str = ""
    """That of extra_kv's, likewise."""
    page_size: int = 0
    """Rows of a page of kv, of which num_keys is a multiple; 0: no pages."""
    indices_3d: bool = False
    extra_keys: int = 0
    """Rows of a second source, which `extra_topk` slots of another list name, where that is not
    0; both lists have the features above."""
    extra_topk: int = 0
    ranges: str = ""
    """Lists that are ranges, of `topk` or `extra_topk` rows at most: "kv", "extra_kv" or both."""
    index_block: int = 1
    """Rows of kv that an id names."""
    batch_invariant: bool = False
    """The forward is asked for bits that do not depend on the batch."""
    cancels: bool = False
    """dS all but vanishes (a single key, say), so norms of gradients say nothing; rows still do."""

    @property
    def judges_norms(self) -> bool:
        """Whether the contract's norm rule applies: standard-normal data, default scale."""
        plain = self.logit_scale == 1.0 and self.logit_shift == 0.0
        return plain and self.sm_scale is None and not (self.cancels or self.row_sizes)


@dataclass(frozen=True)
class SparseMlaInputs:
    """q `[S, H, d_qk]`, kv, indices, do (dO) `[S, H, d_v]`, and a case's optional operands.

    With `ends` the list of kv is a range, and `indices` are its starts `[S]`.
    """

    case: SparseMlaCase
    q: Tensor
    kv: Tensor
    indices: Tensor
    do: Tensor
    topk_length: Tensor | None
    attn_sink: Tensor | None
    ends: Tensor | None = None
    extra_kv: Tensor | None = None
    extra_indices: Tensor | None = None
    extra_topk_length: Tensor | None = None
    extra_ends: Tensor | None = None

    def to(self, device: str | torch.device) -> "SparseMlaInputs":
        """The same values on a device, laid out in the same way."""

        def move(x: Tensor) -> Tensor:
            return strided_copy(x.to(device)) if self.case.strided else x.to(device)

        def move_kv(x: Tensor) -> Tensor:
            is_paged = self.case.kv_format and x.dim() == 3
            return pages_apart(x.to(device)) if is_paged else move(x)

        if torch.device(device).type == self.q.device.type:
            return self
        laid_out = ("q", "kv", "indices", "do", "extra_kv", "extra_indices")
        moved: dict[str, Any] = {}
        for name in (f.name for f in fields(self) if f.name != "case"):
            x = getattr(self, name)
            if x is not None:
                moved[name] = move(x) if name in laid_out else x.to(device)
        moved["kv"] = move_kv(self.kv)
        return replace(self, **moved)

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
            **self.of_extra,
            **({"index_block": self.case.index_block} if self.case.index_block > 1 else {}),
            **self.of_format,
        }

    @property
    def of_format(self) -> dict[str, str]:
        """Keyword argument of packed rows of a format that is named: that of a source whose bytes
        do not tell it."""
        main, extra = self.case.kv_format, self.case.extra_format
        name = extra if extra and main and ROW_FORMATS[main].fp4 else main
        return {"kv_format": name} if name else {}

    @property
    def rows(self) -> Any:
        """The list of kv's rows as functions take it: ids, or a pair of starts and ends."""
        return self.indices if self.ends is None else (self.indices, self.ends)

    @property
    def of_extra(self) -> dict[str, Any]:
        """Keyword arguments of a second source."""
        if self.extra_kv is None:
            return {}
        ids, ends = self.extra_indices, self.extra_ends
        return {
            "extra_kv": self.extra_kv,
            "extra_indices": ids if ends is None else (ids, ends),
            "extra_topk_length": self.extra_topk_length,
        }

    @cached_property
    def joined(self) -> "SparseMlaInputs":
        """Inputs of one source and one list of ids that mean the same."""
        case = self.case
        if not (self.of_extra or case.ranges or case.kv_format) and case.index_block == 1:
            return self
        kv, extra = self.kv, self.of_extra
        if case.kv_format:
            kv = reference.unpack_kv(kv, case.kv_format)
        if case.extra_format:
            extra["extra_kv"] = reference.unpack_kv(extra["extra_kv"], case.extra_format)
        kv, ids = reference.join_sources(
            kv, self.rows, topk_length=self.topk_length, index_block=case.index_block, **extra
        )
        plain: dict[str, Any] = {"extra_keys": 0, "extra_topk": 0, "ranges": "", "index_block": 1}
        plain |= {"kv_format": "", "extra_format": ""}
        plain |= {"page_size": 0, "kv_3d": False, "indices_3d": False, "topk_length": False}
        one = replace(case, num_keys=len(kv), topk=ids.shape[1], **plain)
        given = self.q, kv, ids, self.do, None, self.attn_sink
        return SparseMlaInputs(one, *given)

    def lay_out(self, x: Tensor) -> Tensor:
        """x on the inputs' device, strided where the case says so."""
        x = x.to(self.q.device)
        return strided_copy(x) if self.case.strided else x


def _packed_rows(kv: Tensor, scale: str, form: str, page_size: int) -> Tensor:
    """Rows (S_kv, d_qk) as packed ones, or in pages; a row that is not finite has such bytes
    everywhere."""
    packed = reference.quantize_kv(kv, scale, form)
    packed[~kv.isfinite().all(dim=1)] = NAN_BYTE
    if not page_size:
        return packed
    pages = packed.view(-1, page_size, packed.shape[1])
    if form == "v32":
        return pages
    slots, paged = torch.arange(len(kv)), torch.empty_like(pages)
    whole = reference.fields(form, 1, slots)
    for source, place in zip(whole, reference.fields(form, page_size, slots), strict=True):
        paged.view(-1)[place] = packed.view(-1)[source]
    return paged


def _source(case: SparseMlaCase, kv: Tensor, prefix: str) -> Tensor:
    """A source as the case has it, of rows or pages; `prefix`: of the extra one "extra_"."""
    page_size = 0 if prefix else case.page_size
    if case.packed:
        form = case.extra_format if prefix else case.kv_format
        keys = _packed_rows(kv, case.packed, form or "v32", page_size)
    else:
        keys = kv.to(case.dtype)
        keys = keys.view(-1, page_size, keys.shape[-1]) if page_size else keys
    return keys[:, None, :] if case.kv_3d else keys


def _logits_of_size(
    case: SparseMlaCase, q: Tensor, sources: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """q and the sources with logits of the case's scale and shift."""
    if case.logit_scale != 1.0:
        q = q * (case.logit_scale / 3)  # a default logit is N(0, 1): 3 sigma reach the scale
    if (case.logit_scale != 1.0 or case.logit_shift != 0.0) and not case.rounded_dots:
        # Multiples of 1/4 times multiples of q_step, 8 bits each: sums stay below 2^24 steps.
        q_step = 2.0 ** math.floor(math.log2(max(case.logit_scale / 3, 1))) / 32
        q_step = max(q_step, 0.25)
        q, sources = (q / q_step).round() * q_step, [(kv * 4).round() / 4 for kv in sources]
    if case.logit_shift != 0.0:
        wanted = abs(case.logit_shift) * math.sqrt(case.d_qk)
        q[..., -1] = math.copysign(2.0 ** round(math.log2(wanted)), case.logit_shift)
        for kv in sources:
            kv[..., -1] = 1.0
    return q, sources


def make_sparse_mla_inputs(
    case: SparseMlaCase, seed: int, device: str | torch.device = "cpu"
) -> SparseMlaInputs:
    """The inputs of one case; the same (case, seed) gives the same values on every device."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        is_large = math.prod(shape) > MANY and case.dtype != torch.float64
        dtype = torch.float32 if is_large else torch.float64
        return torch.randn(*shape, generator=generator, dtype=dtype).double()

    q = normal(case.num_queries, case.num_heads, case.d_qk)
    kv = normal(case.num_keys, case.d_qk)
    do = normal(case.num_queries, case.num_heads, case.d_v)
    sources, lists = [kv], [draw_list(case, "kv", case.num_keys, case.topk, generator)]
    sink = draw_sink(case, generator)
    if case.extra_topk:
        sources.append(normal(case.extra_keys, case.d_qk))
        lists.append(draw_list(case, "extra_kv", case.extra_keys, case.extra_topk, generator))
    if case.row_sizes:
        sources = [rows * torch.exp(case.row_sizes * normal(len(rows), 1)) for rows in sources]
    q, sources = _logits_of_size(case, q, sources)
    if case.nan_row:
        plant_nan_row(sources[0], lists[0].indices)
    if case.poison:
        for rows, one in zip(sources, lists, strict=True):
            poison_rows(rows, one.named)
    if case.empty_rows or case.poison:
        for s, named in enumerate(zip(*(one.named for one in lists), strict=True)):
            if not any(map(len, named)):  # such a query's dQ is 0, whatever dO holds
                do[s] = (torch.inf, torch.nan)[s % 2]

    def finish(x: Tensor, dtype: torch.dtype) -> Tensor:
        x = x.to(device=device, dtype=dtype)
        return strided_copy(x) if case.strided else x

    operands: dict[str, Tensor] = {}
    for prefix, rows, one in zip(("", "extra_"), sources, lists, strict=False):
        keys = _source(case, rows, prefix)
        keys = finish(keys, keys.dtype)
        is_paged = case.kv_format and keys.dim() == 3
        operands[f"{prefix}kv"] = pages_apart(keys) if is_paged else keys
        is_3d = case.indices_3d and one.ends is None
        ids = one.indices[:, None, :] if is_3d else one.indices
        operands[f"{prefix}indices"] = finish(ids, torch.int32)
        for name, x in (("topk_length", one.lengths), ("ends", one.ends)):
            if x is not None:
                operands[f"{prefix}{name}"] = x.to(device)
    given: dict[str, Any] = {"topk_length": None, **operands}
    given |= {"q": finish(q, case.dtype), "do": finish(do, case.dtype)}
    return SparseMlaInputs(case, **given, attn_sink=None if sink is None else sink.to(device))
