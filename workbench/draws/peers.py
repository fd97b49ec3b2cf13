"""Peers of a draw, each in its best legal form; where one cannot serve it, it says why."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashdsa import reference
from flashdsa.bench import cases, training
from flashdsa.bench.result import OURS
from flashdsa.bench.runner import Peer
from workbench.bench import attention, prefill
from workbench.bench.attention import Prepared
from workbench.bench.indexer import DeepGemm, judge_peer
from workbench.bench.top_ks import NAMES, load_top_k
from workbench.draws import indexers, two_sources
from workbench.draws.distribution import Draw
from workbench.draws.inputs import make_task
from workbench.draws.timing import microseconds

PROMISES = {
    option: f"{OURS}, {option.replace('_', ' ')}" for option in ("deterministic", "batch_invariant")
}
"""Ours with an option that costs time, by its name: no peers, but timed by turns with them."""
OTHERS = {backend: f"{OURS}, {backend}" for backend in ("triton", "torch")}
"""Ours by another backend, by its name: likewise, where they are asked for."""
LAYERS = 60
"""DeepGEMM's metadata are made once a step, for all layers."""
INDEX_BACKWARD_HEADS = 64
"""cuDNN Frontend's backward of the indexer takes no fewer."""
HALF_WEIGHTS = 2e-2
"""Norm of an error where index weights are bf16 and results bf16 or a softmax's."""


def peers_of(draw: Draw, charges: dict[str, float]) -> dict[str, Peer]:
    """The contenders beside ours, by name.

    Args:
        charges: gets microseconds by name that a call of a peer is charged besides.
    """
    others = {name: partial(elsewhere, draw, backend) for backend, name in OTHERS.items()}
    return others | _peers_of(draw, charges)


def _peers_of(draw: Draw, charges: dict[str, float]) -> dict[str, Peer]:
    kind, _, wide = draw.operation.partition("-")
    kind = {"prompts": "forward", "chats": "decode"}.get(kind, kind)
    if kind == "backward":
        named = promise("deterministic")
        return named if wide else named | {"cuDNN Frontend": attention.cudnn_backward}
    if kind in ("forward", "decode"):
        module = two_sources if wide else attention
        packed = draw.values.get("rows", "bf16") != "bf16"
        peer = module.flash_mla_decode if packed else module.flash_mla_forward
        return promise("batch_invariant") | {"FlashMLA": peer}
    if draw.operation == "indexer":
        return {f"DeepGEMM + {one}": partial(paged_pair, one, charges) for one in NAMES}
    if draw.operation.startswith("two-levels"):
        return {"our scores, torch": indexers.by_torch}
    if draw.operation == "prefill":
        first = "DeepGEMM" if draw.values["dtype"] == "fp8" else "cuDNN Frontend"
        return {f"{first} + {one}": prefill.pair(one) for one in NAMES}
    return {"cuDNN Frontend": cudnn_training}


def promise(option: str) -> dict[str, Peer]:
    """The contender of an option, by its name."""
    return {PROMISES[option]: lambda _, task: (partial(task.call, **{option: True}), task.judge)}


def elsewhere(draw: Draw, backend: str, case: cases.Case, task: cases.Task) -> Prepared:
    """The draw's call by another backend, of inputs that are made again."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    own = make_task(draw, case.options.get("part", ""), device, backend)
    return own.call, own.judge


def paged_pair(
    name: str, charges: dict[str, float], case: cases.Case, task: cases.Task
) -> Prepared:
    """DeepGEMM's paged logits, then the named top-k; its metadata are charged once in LAYERS."""
    peer = DeepGemm(task.inputs)
    top_k = load_top_k(name, task.inputs.seq_lens, peer.width, case.topk)
    if not charges:
        charges["metadata"] = microseconds(peer.make_plan) / LAYERS
    charges[f"DeepGEMM + {name}"] = charges["metadata"]
    peer.make_plan()
    return lambda: top_k(peer.logits()), partial(judge_peer, task.inputs)


def cudnn_training(case: cases.Case, task: cases.Task) -> Prepared:
    """cuDNN Frontend's target (normalised), scores (their softmax) and backward of the indexer,
    compiled ahead; operands in its layout and dtypes are made outside the clock."""
    module, x = import_module("cudnn_kernels"), task.inputs
    part, slots = case.options["part"], module.filled_up(x.indices)
    lengths = (x.indices >= 0).sum(1, dtype=torch.int32)
    judge = partial(judge_training, part, x)
    if part == "target":
        by_head = pad(x.lse.T, (0, -len(x.q) % 8)).contiguous()
        call = partial(module.score_recompute, part, x.q, x.kv, by_head, slots, lengths)
        return call, judge
    weights = x.weights.bfloat16()
    if part == "scores":
        by_head = pad(weights.T, (0, -len(x.q) % 8)).contiguous()
        operands = x.q_index, x.k_index, by_head, slots, lengths
        return partial(module.score_recompute, part, *operands), judge
    missing = INDEX_BACKWARD_HEADS - case.h
    q, weights = pad(x.q_index, (0, 0, 0, missing)), pad(weights, (0, missing))
    grad = module.filled_up(x.scores, 0.0)
    return partial(module.indexer_backward, q, x.k_index, weights, slots, grad), judge


def judge_training(part: str, x: training.TrainingInputs, found: Any) -> cases.Verdict:
    """A few queries of what cuDNN Frontend gives."""
    few, some, topk = x.few(), cases.judged_queries(len(x.q)), x.indices.shape[1]
    half = few._replace(weights=few.weights.bfloat16().float())
    if part == "target":
        right = reference.attention_target(few.q, few.kv, few.lse, few.indices)
        right = right / right.sum(1, keepdim=True).clamp(min=1e-30)
        return cases.judge_errors({part: (_error(found[some, :topk], right), HALF_WEIGHTS)})
    index = half.q_index, half.k_index, half.weights, half.indices
    if part == "scores":
        right = reference.indexer_scores(*index).softmax(1).nan_to_num()
        return cases.judge_errors({part: (_error(found[some, :topk], right), HALF_WEIGHTS)})
    gradients, heads = reference.indexer_bwd(*index, half.scores), x.q_index.shape[1]
    errors = {
        "dQ": cases.norm_error(found[0][some, :heads], gradients.dq_index),
        "dW": cases.norm_error(found[2][some, :heads], gradients.d_weights),
    }
    whole = x._replace(weights=x.weights.bfloat16().float())
    rows = [row for row in few.indices[:, 0].tolist() if row >= 0]
    errors["dK"] = cases.worst(
        [0.0, *(cases.norm_error(found[1][row], training.dk_row(whole, row)) for row in rows)]
    )
    return cases.judge_errors({name: (error, HALF_WEIGHTS) for name, error in errors.items()})


def _error(found: Tensor, right: Tensor) -> float:
    """`norm_error` of the slots that count."""
    return cases.norm_error(found.where(right > 0, 0), right)
