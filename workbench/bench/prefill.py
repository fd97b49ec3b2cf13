"""The indexer over shared keys (`dsa_topk_prefill`), and logits of all queries with a top-k.

Peers: DeepGEMM's logits of fp8 keys, cuDNN Frontend's of bf16 keys, each with a top-k of cuDNN
Frontend, FlashInfer or torch, as one call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

import flashdsa
from flashdsa.bench.cases import Case, Task, Verdict, products_ceiling
from flashdsa.bench.indexer import judge_choice
from flashdsa.bench.runner import Peer
from flashdsa.bench.timer import Call
from flashdsa.problem import INDEX_HEAD_DIM
from flashdsa.verify.tolerances import SCORE_TOLERANCES
from workbench.bench.indexer import DEEP_GEMM_HEADS, padded
from workbench.bench.top_ks import load_top_k

TORCH_LIMIT = 2**27
"""Scores up to which torch's top-k, far slower than the others, is timed."""
JUDGED = 16
Inputs = dict[str, Any]
"""Operands of `dsa_topk_prefill`, by name."""


def make_inputs(case: Case, device: str, seed: int) -> Inputs:
    """Causal: the last S of S_kv tokens see all tokens up to themselves."""
    generator = torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, generator=generator, device=device)
    q, k = normal(case.s, case.h, INDEX_HEAD_DIM), normal(case.s_kv, INDEX_HEAD_DIM)
    weights = normal(case.s, case.h)
    k_scale = k.abs().amax(-1).clamp_min(1e-4) / 448
    ends = torch.arange(case.s_kv - case.s, case.s_kv, device=device) + 1
    fp8 = case.dtype == "fp8"
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    return {
        "q_index": q.to(dtype),
        "k_index": ((k / k_scale[:, None]) if fp8 else k).to(dtype),
        "weights": weights,
        "starts": None,
        "ends": ends.int(),
        "k_scale": k_scale if fp8 else None,
    }


def make_task(case: Case, device: str, seed: int, backend: str) -> Task:
    """The call on causal inputs."""
    return task_of(make_inputs(case, device, seed), case.topk, backend)


def task_of(x: Inputs, topk: int, backend: str) -> Task:
    """The call on some inputs, and how it is judged."""
    (queries, heads, _), device = x["q_index"].shape, x["q_index"].device
    ids = torch.full((queries, topk), -99, dtype=torch.int32, device=device)

    def call() -> Tensor:
        flashdsa.dsa_topk_prefill(**x, topk_indices=ids, backend=backend)
        return ids

    begins = x["starts"] if x["starts"] is not None else 0
    seen = float((x["ends"].double() - begins).sum())
    work = 2.0 * seen * heads * INDEX_HEAD_DIM
    judge = partial(judge_rows, x, SCORE_TOLERANCES[backend])
    return Task(call, judge, work, products_ceiling(device.type), x, exact=True)


def judge_rows(x: Inputs, tolerance: float, ids: Tensor) -> Verdict:
    """Rows of key that JUDGED queries chose, against scores in float64."""
    findings = []
    for query in range(0, len(ids), max(1, len(ids) // JUDGED)):
        start = 0 if x["starts"] is None else int(x["starts"][query])
        length = int(x["ends"][query]) - start
        chosen = ids[query][: min(ids.shape[1], length)].long() - start
        if bool(((chosen < 0) | (chosen >= length)).any()) or len(chosen.unique()) < len(chosen):
            findings.append(f"query {query}: a row outside its range, or twice")
        elif len(chosen) < length:
            scores, sizes = float64_scores(x, query, start, start + length)
            finding = judge_choice(scores, sizes, chosen, tolerance)
            findings += [f"query {query}: {finding}"] if finding else []
    return Verdict({}, findings)


def float64_scores(x: Inputs, query: int, start: int, end: int) -> tuple[Tensor, Tensor]:
    """Scores of a query's keys, and the same of |weights|."""
    dots = (x["k_index"][start:end].double() @ x["q_index"][query].double().T).relu()
    scale = 1.0 if x["k_scale"] is None else x["k_scale"][start:end].double()
    weights = x["weights"][query].double()
    return (dots @ weights) * scale, (dots @ weights.abs()) * scale


def logits_call(x: Inputs) -> Callable[[], Tensor]:
    """DeepGEMM's of fp8, cuDNN Frontend's (compiled ahead) of bf16, in their best legal form.

    Keys that a query does not see are anything; a row of packed sequences begins with its first.
    """
    q, k, weights, scale = (x[name] for name in ("q_index", "k_index", "weights", "k_scale"))
    starts, ends, keys = x["starts"], x["ends"], len(x["k_index"])
    longest = keys if starts is None else int((ends - starts).max())
    if scale is None:
        module = import_module("cudnn_kernels")
        k = pad(k, (0, 0, 0, -keys % 8))
        if starts is None:
            return partial(module.logits_behind, q, k, weights, keys)
        bounds = torch.cat([starts.unique(), torch.full_like(ends[:1], keys)])
        return partial(module.packed_logits, q, k, weights, bounds, longest + -longest % 8)
    heads, more = max(0, DEEP_GEMM_HEADS - q.shape[1]), -keys % padded(1)
    q = pad(q.view(torch.uint8), (0, 0, 0, heads)).view(q.dtype)
    k = pad(k.view(torch.uint8), (0, 0, 0, more)).view(k.dtype)
    begins = torch.zeros_like(ends) if starts is None else starts
    operands = q, (k, pad(scale, (0, more))), pad(weights, (0, heads)), begins, ends
    compressed = {} if starts is None else {"max_seqlen_k": padded(longest)}
    logits = import_module("deep_gemm").fp8_mqa_logits
    return partial(logits, *operands, clean_logits=False, **compressed)


def pair(name: str) -> Peer:
    """Logits of all queries, then the named top-k."""

    def prepare(case: Case, task: Task) -> tuple[Call, Callable[[Any], Verdict]]:
        x: Inputs = task.inputs
        if name == "torch.topk" and case.s * case.s_kv > TORCH_LIMIT:
            raise NotImplementedError("too many scores")
        begins = torch.zeros_like(x["ends"]) if x["starts"] is None else x["starts"]
        lengths = x["ends"] - begins
        logits = logits_call(x)
        top_k = load_top_k(name, lengths, logits().shape[1], case.topk)
        tolerance = SCORE_TOLERANCES["sm90"]
        return lambda: top_k(logits()), lambda ids: judge_rows(x, tolerance, ids + begins[:, None])

    return prepare
