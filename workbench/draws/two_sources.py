"""Draws of 512 columns: entries beside a window of tokens in one softmax, rows without RoPE."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

import flashdsa
from flashdsa.bench import attention, cases
from flashdsa.problem import D_V, PAGE_SIZE
from flashdsa.row_formats import ROW_FORMATS
from workbench.bench.attention import Prepared, padded_heads, padded_lists
from workbench.draws.distribution import COLUMNS, WINDOW, Draw
from workbench.draws.ids import causal_rows, draw_ids, draw_lengths, positions, shuffled_pages

Rows = Tensor | tuple[Tensor, Tensor]
"""Ids of each query's slots, or its range."""
DECODE_SLOTS = 64
"""FlashMLA's decode takes lists of multiples of these slots."""


class Source(NamedTuple):
    """Rows, the list of each query, and the same list as a range if the call gives it so."""

    kv: Tensor  # (rows, 512) bf16, or pages (pages, 64, 1, bytes)
    ids: Tensor  # (S, slots) int32
    lengths: Tensor | None = None
    limits: tuple[Tensor, Tensor] | None = None
    row_format: str | None = None

    @property
    def lists(self) -> Rows:
        """Its slots as the call gives them."""
        return self.ids if self.limits is None else self.limits

    def valid(self, queries: slice | list[int]) -> Tensor:
        """Whether each slot counts."""
        ids = self.ids[queries]
        slots = torch.arange(ids.shape[1], device=ids.device)
        return (ids >= 0) & (True if self.lengths is None else slots < self.lengths[queries, None])

    def rows(self, queries: list[int]) -> Tensor:
        """bf16 (queries, slots, 512): the rows that these lists name."""
        slots = self.ids[queries].clamp(min=0).flatten()
        rows = flashdsa.read_kv_cache(self.kv, slots, kv_format=self.row_format)
        return rows.view(len(queries), -1, COLUMNS)


class Inputs(NamedTuple):
    """Operands of a call over one source or two; the window's comes first."""

    q: Tensor
    sources: list[Source]
    sink: Tensor | None

    @property
    def valid(self) -> int:
        """Slots that count, of all sources."""
        return sum(int(one.valid(slice(None)).sum()) for one in self.sources)

    @property
    def read_bytes(self) -> float:
        """Bytes of the rows of these slots."""
        return float(
            sum(int(x.valid(slice(None)).sum()) * x.kv.shape[-1] * x.kv.element_size()
                for x in self.sources)
        )  # fmt: skip

    @property
    def joined(self) -> Source:
        """bf16 sources as one, which a kernel of one list takes."""
        first, *rest = self.sources
        if not rest:
            return first
        (extra,), width = rest, first.ids.shape[1]
        ids = torch.cat([first.ids, torch.where(extra.ids >= 0, extra.ids + len(first.kv), -1)], 1)
        lengths = None if extra.lengths is None else extra.lengths + width
        return Source(torch.cat([first.kv, extra.kv]), ids, lengths)

    def operands(self) -> tuple[Tensor, Rows, dict[str, Any]]:
        """kv, its lists, and keywords of the calls."""
        first, *rest = self.sources
        options: dict[str, Any] = {"topk_length": first.lengths, "attn_sink": self.sink}
        if rest:
            (extra,) = rest
            options["extra_kv"], options["extra_topk_length"] = extra.kv, extra.lengths
            options["extra_indices"] = extra.lists
        return first.kv, first.lists, options


def make_two_sources(draw: Draw, device: str, backend: str) -> cases.Task:
    """The call of a draw, judged on four queries."""
    decodes = draw.operation == "decode-512"
    x = _decode_inputs(draw, device) if decodes else _forward_inputs(draw, device)
    if draw.operation == "backward-512":
        return backward_task(x, draw.values["tensors"], backend)
    return forward_task(x, backend, decodes=False)


def forward_task(x: Inputs, backend: str, *, decodes: bool) -> cases.Task:
    """`sparse_mla_fwd` on some inputs; a decode is bound by reading rows."""
    kv, lists, options = x.operands()
    call = partial(
        flashdsa.sparse_mla_fwd, x.q, kv, lists, kv_format=x.sources[0].row_format,
        backend=backend, **options,
    )  # fmt: skip
    if decodes:
        work, ceiling = x.read_bytes, cases.reading_ceiling(x.q.device.type)
    else:
        work = 2.0 * x.valid * x.q.shape[1] * (COLUMNS + D_V)
        ceiling = cases.products_ceiling(x.q.device.type)
    return cases.Task(call, lambda found: judge(x, *found[:2]), work, ceiling, x)


class Backward(NamedTuple):
    """Operands of `mla_bwd` over one source or two, and the same joined, as it is judged."""

    x: Inputs
    joined: attention.BackwardInputs
    backend: str

    def call(self, deterministic: bool = False) -> tuple[Tensor, ...]:
        """dQ, dKV of each source and, with a sink, its gradient."""
        kv, lists, options = self.x.operands()
        _, d_out, lse, out = self.joined
        return flashdsa.mla_bwd(
            self.x.q, kv, d_out, lse, out, lists, deterministic=deterministic,
            backend=self.backend, **options,
        )  # fmt: skip

    def judge(self, found: tuple[Tensor, ...]) -> cases.Verdict:
        """Gradients of both sources as one's."""
        dq, *rest = found
        count = len(self.x.sources)
        return attention.judge_backward(self.joined, dq, torch.cat(rest[:count]), *rest[count:])


def backward_task(x: Inputs, seed: int, backend: str) -> cases.Task:
    """`mla_bwd` on some inputs, after one forward."""
    kv, lists, options = x.operands()
    out, lse = flashdsa.sparse_mla_fwd(x.q, kv, lists, backend=backend, **options)
    g = torch.Generator(out.device).manual_seed(seed + 1)
    d_out = torch.randn(out.shape, device=out.device, generator=g).to(out.dtype)
    one = x.joined
    forward = attention.AttentionInputs(x.q, one.kv, one.ids, one.lengths, x.sink)
    task = Backward(x, attention.BackwardInputs(forward, d_out, lse, out), backend)
    work = 2.0 * x.valid * x.q.shape[1] * (3 * COLUMNS + 2 * D_V)
    return cases.Task(task.call, task.judge, work, cases.products_ceiling(out.device.type), task)


def judge(x: Inputs, out: Tensor, lse: Tensor | None = None) -> cases.Verdict:
    """O (S, H, 512) of four queries over their rows of all sources, and lse."""
    some = cases.judged_queries(len(x.q))
    rows = torch.cat([one.rows(some) for one in x.sources], 1)
    valid = torch.cat([one.valid(some) for one in x.sources], 1)
    slots = torch.arange(valid.numel(), device=valid.device).view_as(valid).where(valid, -1)
    few = attention.AttentionInputs(x.q[some], rows.flatten(0, 1), slots.int(), None, x.sink)
    return attention.judge_forward(few, out[some], None if lse is None else lse[some])


def _forward_inputs(draw: Draw, device: str) -> Inputs:
    """A sequence: the window is the last 128 tokens of S, entries are rows that came before."""
    v, g = draw.values, torch.Generator(device).manual_seed(draw.values["tensors"])
    normal = partial(torch.randn, device=device, generator=g, dtype=torch.bfloat16)
    ids = draw_ids(v["ids"], causal_rows(v["S"], v["S_kv"], device), v["topk"], v["S_kv"], g)
    lengths = draw_lengths(v["lengths"], v["S"], v["topk"], g)
    entries = Source(normal(v["S_kv"], COLUMNS), ids, lengths)
    sources = [entries]
    if v["window"]:
        tokens = torch.arange(v["S"], device=device)
        sources.insert(0, window(normal(v["S"], COLUMNS), tokens + 1, v["window"] == "range"))
    sink = torch.randn(v["heads"], device=device, generator=g) if v["sink"] else None
    return Inputs(normal(v["S"], v["heads"], COLUMNS), sources, sink)


def window(kv: Tensor, ends: Tensor, is_range: bool) -> Source:
    """The last 128 rows before `ends`."""
    ids = ends[:, None] - WINDOW + torch.arange(WINDOW, device=ends.device)
    limits = ((ends - WINDOW).int(), ends.int()) if is_range else None
    return Source(kv, ids.clamp(min=-1).int(), None, limits)


def _decode_inputs(draw: Draw, device: str) -> Inputs:
    """A step over pages of entries, a few pages of the window beside them."""
    v, g = draw.values, torch.Generator(device).manual_seed(draw.values["tensors"])
    ratio, next_n, k = v["ratio"], v["next_n"], v["topk"]
    tokens = torch.tensor(draw.lengths, device=device)
    seen = (tokens[:, None] - torch.arange(next_n - 1, -1, -1, device=device)).clamp(min=1)
    rows = (seen // ratio).flatten()
    table, pool = shuffled_pages((tokens // ratio).clamp(min=1), PAGE_SIZE, g)
    at = positions(0, rows, k, g)
    pages = table.repeat_interleave(next_n, 0).gather(1, at.clamp(min=0) // PAGE_SIZE)
    ids = (pages * PAGE_SIZE + at % PAGE_SIZE).where(at >= 0, -1).int()
    given = rows.clamp(max=k).int() if v["lengths"] or int(rows.min()) < k else None
    packed = v["rows"] if v["rows"] != "bf16" else None
    sources = [Source(paged_rows(pool, packed, g), ids, given, None, packed)]
    if v["window"]:
        kept = WINDOW + PAGE_SIZE  # tokens of each request: its last ones, at their offset in pages
        first = (tokens - 1) // PAGE_SIZE * PAGE_SIZE - WINDOW
        place = (seen - 1 - first[:, None]).flatten()[:, None] - torch.arange(WINDOW, device=device)
        requests = torch.arange(len(tokens), device=device).repeat_interleave(next_n)[:, None]
        exists = torch.arange(WINDOW, device=device) < seen.flatten()[:, None]
        slots = (requests * kept + place).where(exists & (place >= 0), -1).int()
        cache = paged_rows(len(tokens) * kept // PAGE_SIZE, packed, g)
        sources.insert(0, Source(cache, slots, None, None, packed))
    sink = torch.randn(v["heads"], device=device, generator=g) if v["window"] else None
    q = torch.randn(len(rows), v["heads"], COLUMNS, device=device, generator=g).bfloat16()
    return Inputs(q, sources, sink)


def paged_rows(pages: int, row_format: str | None, g: torch.Generator) -> Tensor:
    """Pages of 64 rows; beyond OWN_ROWS they repeat earlier ones' values."""
    own = min(pages, attention.OWN_ROWS // PAGE_SIZE)
    kv = torch.randn(own * PAGE_SIZE, COLUMNS, device=g.device, generator=g).bfloat16()
    repeats = -(-pages // own)
    if row_format is None:
        return kv.repeat(repeats, 1)[: pages * PAGE_SIZE]
    width = ROW_FORMATS[row_format].row_bytes
    shape = own, ROW_FORMATS[row_format].page_bytes(PAGE_SIZE)
    memory = torch.zeros(shape, dtype=torch.uint8, device=g.device)
    cache = memory[:, : PAGE_SIZE * width].view(own, PAGE_SIZE, 1, width)
    slots = torch.arange(len(kv), device=g.device)
    flashdsa.write_kv_cache(kv, slots, cache, kv_format=row_format)
    whole = memory.repeat(repeats, 1)[:pages]
    return whole[:, : PAGE_SIZE * width].view(pages, PAGE_SIZE, 1, width)


def flash_mla_forward(case: cases.Case, task: cases.Task) -> Prepared:
    """FlashMLA's prefill kernel over bf16 rows, two sources joined outside the clock."""
    peer, x = import_module("flash_mla").flash_mla_sparse_fwd, task.inputs
    one, (q, sink) = x.joined, padded_heads(x.q, x.sink)
    ids, lengths = padded_lists(one.ids, one.lengths)
    call = partial(
        peer, q, one.kv[:, None], ids[:, None], COLUMNS**-0.5, attn_sink=sink,
        topk_length=lengths, use_legacy=True,
    )  # fmt: skip
    return call, lambda found: judge(x, found[0][:, : case.h])


def flash_mla_decode(case: cases.Case, task: cases.Task) -> Prepared:
    """FlashMLA's decode of packed rows, its metadata made outside the clock."""
    module, x, next_n = import_module("flash_mla"), task.inputs, int(case.options["next_n"])
    q, sink = padded_heads(x.q, x.sink)
    q = q.view(case.s // next_n, next_n, -1, COLUMNS)
    first, *rest = x.sources

    def listed(one: Source) -> tuple[Tensor, Tensor | None]:
        """Ids by request, -1 from a query's length on, and the longest length of each one's
        queries; rows like V3.2's take none."""
        ids = one.ids.where(one.valid(slice(None)), -1)
        ids = pad(ids, (0, -ids.shape[1] % DECODE_SLOTS), value=-1)
        is_v32 = one.row_format == "v32_no_rope"
        given = None if is_v32 else one.lengths
        lengths = None if given is None else given.view(-1, next_n).amax(1)
        return ids.view(*q.shape[:2], -1), lengths

    ids, lengths = listed(first)
    more: dict[str, Any] = {"attn_sink": sink, "topk_length": lengths, "use_legacy": True}
    if rest:
        extra_ids, extra_lengths = listed(rest[0])
        more |= {"extra_k_cache": rest[0].kv, "extra_indices_in_kvcache": extra_ids}
        more["extra_topk_length"] = extra_lengths
    elif first.row_format:
        more["kv_format"] = first.row_format.upper()
    plan, _ = module.get_mla_metadata()
    operands = q, first.kv, None, None, D_V, plan, None, COLUMNS**-0.5, False, True, ids
    call = partial(module.flash_mla_with_kvcache, *operands, **more)
    return call, lambda found: judge(x, found[0].reshape(case.s, -1, D_V)[:, : case.h])
