"""Tasks of a draw: inputs made on the device, the call, its judge."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

import torch

import flashdsa
from flashdsa.bench import attention, indexer, training
from flashdsa.bench.attention import AttentionInputs
from flashdsa.bench.cases import Case, Task
from flashdsa.problem import D_QK, INDEX_HEAD_DIM, PAGE_SIZE
from workbench.bench import prefill
from workbench.bench.indexer import fill_scores
from workbench.draws import indexers
from workbench.draws.distribution import Draw
from workbench.draws.ids import causal_rows, draw_ids, draw_lengths, positions, shuffled_pages
from workbench.draws.timing import bound
from workbench.draws.two_sources import Source, make_two_sources

DECODES = ("decode", "chats")
PARTS = {"training": ("target", "scores", "backward")}
"""Calls of a draw that are timed one by one, where there is not one only."""


def case_of(draw: Draw, part: str = "") -> Case:
    """Sizes of a draw as peers read them."""
    v = draw.values
    index_heads = v.get("index_heads", 0)
    heads = index_heads if part in ("scores", "backward") else v["heads"]
    dtype = v.get("dtype", "fp8" if draw.operation == "indexer" else "bfloat16")
    options = {"part": part} if part else {}
    if draw.operation == "decode-512":
        options = {"next_n": v["next_n"], "rows": v["rows"], "window": v["window"]}
    if draw.operation in DECODES:
        options = {"packed": v["rows"] == "packed", "next_n": v["next_n"]}
    return Case(draw.queries, draw.keys, heads, v["topk"], dtype, options, draw.line)


def make_task(draw: Draw, part: str, device: str, backend: str) -> Task:
    """The task of a draw, or of one of its PARTS."""
    if draw.operation == "backward":
        x = attention_inputs(draw, device)
        return attention.backward_task(x, draw.values["tensors"], backend)
    if draw.operation.endswith("-512"):
        task = make_two_sources(draw, device, backend)
        forwards = draw.operation != "backward-512"
        return bound(task, task.inputs.q, task.inputs.sources) if forwards else task
    if draw.operation in (*DECODES, "forward", "prompts"):
        makers = {"forward": attention_inputs, "prompts": prompt_inputs}
        x = makers.get(draw.operation, decode_inputs)(draw, device)
        task = attention.forward_task(x, backend, max_logits=draw.values.get("max_logits", False))
        return bound(task, x.q, [Source(x.kv, x.indices, x.topk_length)])
    if draw.operation == "indexer":
        pages = indexer_inputs(draw, device, backend)
        judge = indexers.over_pages(pages, draw.values["topk"], backend).judge
        return replace(indexer.indexer_task(pages, backend), judge=judge)
    if draw.operation.startswith("two-levels"):
        prefills, g = draw.is_prefill, _generator(draw, device)
        keys = prefill_inputs(draw, device) if prefills else indexer_inputs(draw, device, backend)
        return indexers.make_two_levels(draw, keys, g, backend)
    if draw.operation == "prefill":
        shared, topk = prefill_inputs(draw, device), draw.values["topk"]
        judge = indexers.over_keys(shared, topk, backend).judge
        return replace(prefill.task_of(shared, topk, backend), judge=judge)
    return training.training_task(training_inputs(draw, device), part, backend)


def _generator(draw: Draw, device: str) -> torch.Generator:
    return torch.Generator(device).manual_seed(draw.values["tensors"])


def attention_inputs(draw: Draw, device: str) -> AttentionInputs:
    """Operands of the forward and the backward."""
    v, g = draw.values, _generator(draw, device)
    normal = partial(torch.randn, device=device, generator=g, dtype=torch.bfloat16)
    ids = draw_ids(v["ids"], causal_rows(v["S"], v["S_kv"], device), v["topk"], v["S_kv"], g)
    if v["invalid"]:
        bad = torch.rand(ids.shape, device=device, generator=g) < v["invalid"]
        ids.masked_fill_(bad, -1)
    lengths = draw_lengths(v["lengths"], v["S"], v["topk"], g)
    sink = torch.randn(v["heads"], device=device, generator=g) if v["sink"] else None
    q = normal(v["S"], v["heads"], D_QK)
    return AttentionInputs(q, normal(v["S_kv"], D_QK), ids, lengths, sink)


def prompt_inputs(draw: Draw, device: str) -> AttentionInputs:
    """Causal queries at the end of a young prompt, or packed short documents, which are as long.

    Lists shorter than topk end with -1; they have lengths, too, in half of the draws.
    """
    v, g = draw.values, _generator(draw, device)
    normal = partial(torch.randn, device=device, generator=g, dtype=torch.bfloat16)
    at = torch.arange(draw.queries, device=device) + v["before"]
    first = at - at % -(-draw.keys // v["documents"])
    ids = positions(0, at + 1 - first, v["topk"], g)
    ids = (ids + first[:, None]).where(ids >= 0, -1).int()
    lengths = (at + 1 - first).clamp(max=v["topk"]).int() if v["lengths"] else None
    q = normal(draw.queries, v["heads"], D_QK)
    return AttentionInputs(q, normal(draw.keys, D_QK), ids, lengths, None)


def decode_inputs(draw: Draw, device: str) -> AttentionInputs:
    """A step over pages: query j of a request sees all of its tokens but the last next_n - 1 - j.

    Slots from a query's length on are -1: a kernel without lengths serves them, too.
    """
    v, g = draw.values, _generator(draw, device)
    tokens, k, next_n = torch.tensor(draw.lengths, device=device), v["topk"], v["next_n"]
    table, pool = shuffled_pages(tokens, PAGE_SIZE, g)
    behind = torch.arange(next_n - 1, -1, -1, device=device)
    rows = (tokens[:, None] - behind).clamp(min=1).flatten()
    newest = min(v["ids"][1], k) if v["ids"][0] == "window" else 0
    at = positions(newest, rows, k, g)
    pages = table.repeat_interleave(next_n, 0).gather(1, at.clamp(min=0) // PAGE_SIZE)
    ids = (pages * PAGE_SIZE + at % PAGE_SIZE).where(at >= 0, -1).int()
    given = v["lengths"] or (draw.operation == "decode" and min(draw.lengths) - next_n + 1 < k)
    own = torch.randn(min(pool * PAGE_SIZE, attention.OWN_ROWS), D_QK, device=device, generator=g)
    kv = own.bfloat16()
    if v["rows"] == "packed":
        kv = flashdsa.quantize_kv(kv, scale=v["scales"])
    kv = kv.repeat(-(-pool * PAGE_SIZE // len(kv)), 1)[: pool * PAGE_SIZE]
    q = torch.randn(len(rows), v["heads"], D_QK, device=device, generator=g).bfloat16()
    return AttentionInputs(q, kv, ids, rows.clamp(max=k).int() if given else None, None)


def indexer_inputs(draw: Draw, device: str, backend: str) -> indexer.IndexerInputs:
    """Pages and rows as `flashdsa bench` has them, and scores of the draw's kind."""
    v = draw.values
    last = range(v["next_n"] - 1, -1, -1)
    rows = tuple(max(0, n - behind) for n in draw.lengths for behind in last)
    options = {"lengths": rows, "next_n": v["next_n"]}
    case = Case(len(rows), max(rows), v["heads"], v["topk"], "fp8", options)
    x = indexer.make_inputs(case, device, v["tensors"], backend)
    if v.get("scores"):
        fill_scores(x, v["scores"], torch.Generator(device).manual_seed(v["tensors"] + 1))
    return x


def prefill_inputs(draw: Draw, device: str) -> prefill.Inputs:
    """Causal queries at the end of the keys, packed documents, or queries of any ranges."""
    v, g = draw.values, _generator(draw, device)
    normal = partial(torch.randn, device=device, generator=g)
    queries, keys, fp8 = draw.queries, draw.keys, v["dtype"] == "fp8"
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    q, k = normal(queries, v["heads"], INDEX_HEAD_DIM), normal(keys, INDEX_HEAD_DIM)
    scale = k.abs().amax(-1).clamp_min(1e-4) / indexer.E4M3_MAX if fp8 else None
    starts, ends = None, causal_rows(queries, keys, device).int()
    if draw.lengths:
        ends_of = torch.tensor((0, *draw.lengths), device=device).cumsum(0)
        starts, ends = flashdsa.causal_ranges(ends_of, num_queries=queries)
    elif v["kind"][0] == "any":
        starts = torch.randint(keys + 1, (queries,), device=device, generator=g).int()
        share = torch.rand(queries, device=device, generator=g)
        ends = starts + (share * (keys + 1 - starts)).int()
    return {
        "q_index": q.to(dtype),
        "k_index": (k if scale is None else k / scale[:, None]).to(dtype),
        "weights": normal(queries, v["heads"]),
        "starts": starts,
        "ends": ends,
        "k_scale": scale,
    }


@lru_cache(maxsize=1)
def training_inputs(draw: Draw, device: str) -> training.TrainingInputs:
    """Operands of all parts of a draw; the last draw's are kept."""
    v, g = draw.values, _generator(draw, device)
    normal = partial(torch.randn, device=device, generator=g)
    rows = causal_rows(v["S"], v["S_kv"], device)
    return training.TrainingInputs(
        normal(v["S"], v["heads"], D_QK, dtype=torch.bfloat16),
        normal(v["S_kv"], D_QK, dtype=torch.bfloat16),
        training.LSE + 0.1 * normal(v["S"], v["heads"]),
        normal(v["S"], v["index_heads"], INDEX_HEAD_DIM, dtype=torch.bfloat16),
        normal(v["S_kv"], INDEX_HEAD_DIM, dtype=torch.bfloat16),
        0.1 * normal(v["S"], v["index_heads"]),
        draw_ids(v["ids"], rows, v["topk"], v["S_kv"], g),
        normal(v["S"], v["topk"]),
        normal(v["S"], v["topk"]).exp(),
        torch.full((v["S"],), 1 / v["S"], device=device),
    )
