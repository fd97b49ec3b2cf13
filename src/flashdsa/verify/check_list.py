"""The checks of `flashdsa check`: each operation on each of its cases, its call, its judge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

import flashdsa
from flashdsa.verify import calls, judge_composed, judge_indexer, judge_prefill, judge_sparse_mla
from flashdsa.verify import check_cases as cases
from flashdsa.verify import judge_indexer_training as judge
from flashdsa.verify.compare import Comparison
from flashdsa.verify.indexer_cases import IndexerCase, make_indexer_inputs
from flashdsa.verify.indexer_training_cases import (
    IndexerTrainingCase,
    IndexerTrainingInputs,
    make_indexer_training_inputs,
)
from flashdsa.verify.operations import COMPOSED, OPERATIONS
from flashdsa.verify.prefill_cases import PrefillCase, make_prefill_inputs
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, SparseMlaInputs, make_sparse_mla_inputs

NEEDS = {
    "sparse_mla": {"sparse_mla_fwd", "mla_bwd"},
    "indexer_kl_loss": {"attention_target", "indexer_scores", "indexer_bwd", "indexer_kl"},
    **{name: set[str]() for name in COMPOSED},
}
"""Operations that a backend must have for an operation that it does not have itself."""


@dataclass(frozen=True)
class Check:
    """An operation on a case.

    Attributes:
        call: the operation alone, of inputs like the judged ones; nothing is judged.
        judge: the operation and the verdicts on its outputs.
        work: grows with the time that it takes; smaller ones run first.
    """

    operation: str
    case: str
    call: Callable[[], object]
    judge: Callable[[], list[Comparison]]
    work: int = 1


def checks_of(seed: int, backend: str, device: str) -> list[Check]:
    """All of them, of inputs on the device, smallest first within an operation."""
    checks = [
        check
        for build in (
            _sparse_mla_checks,
            _backward_checks,
            _indexer_checks,
            _prefill_checks,
            _small_checks,
            _training_checks,
            _composed_checks,
        )
        for check in build(seed, backend, device)
    ]
    return sorted(checks, key=lambda check: (OPERATIONS.index(check.operation), check.work))


def _work(case: SparseMlaCase) -> int:
    return case.num_queries * case.num_heads * case.topk * case.d_qk


def _sparse_mla_checks(seed: int, backend: str, device: str) -> list[Check]:
    runs: tuple[tuple[str, Any, Any, list[SparseMlaCase]], ...] = (
        ("sparse_mla_fwd", calls.sparse_mla_fwd, judge_sparse_mla.check_forward, cases.FORWARD),
        ("sparse_mla", calls.sparse_mla, judge_sparse_mla.check_autograd, []),
        ("mla_bwd", _call_backward, judge_sparse_mla.check_backward, []),
    )
    into_buffers = calls.sparse_mla_fwd_out, judge_sparse_mla.check_forward_out
    rows: list[tuple[str, Any, Any, SparseMlaCase]] = [
        (name, call, check, case)
        for name, call, check, more in runs
        for case in [*cases.ATTENTION, *more]
    ]
    rows += [("sparse_mla_fwd_out", *into_buffers, case) for case in cases.INTO_BUFFERS]

    make = cache(partial(make_sparse_mla_inputs, seed=seed, device=device))

    def build(operation: str, call: Any, check: Any, case: SparseMlaCase) -> Check:
        return Check(
            operation,
            case.name,
            lambda: call(make(case), backend),
            lambda: check(make(case), backend),
            _work(case),
        )

    return [build(*row) for row in rows]


def _call_backward(inputs: SparseMlaInputs, backend: str, **options: Any) -> object:
    """Call the backward with O and lse of zeros."""
    O = torch.zeros_like(inputs.do)
    lse = O.new_zeros(O.shape[:2], dtype=judge_sparse_mla.accumulator_dtype(inputs))
    return calls.mla_bwd(inputs, O, lse, backend, **options)


def _backward_checks(seed: int, backend: str, device: str) -> list[Check]:
    def build(case: cases.Backward) -> Check:
        make = partial(make_sparse_mla_inputs, case.attention, seed, device)
        options: dict[str, Any] = {
            "deterministic": case.deterministic,
            "dkv_dtype": case.dkv_dtype,
        }
        return Check(
            "mla_bwd",
            case.attention.name,
            lambda: _call_backward(make(), backend, **options),
            lambda: judge_sparse_mla.check_backward(make(), backend, **options),
            _work(case.attention),
        )

    return [build(case) for case in cases.BACKWARD]


def _indexer_checks(seed: int, backend: str, device: str) -> list[Check]:
    make = cache(partial(make_indexer_inputs, seed=seed, device=device))

    def scores_of(case: IndexerCase) -> list[Comparison]:
        return judge_indexer.check_scores(make(case), backend)[1]

    def selection_of(case: IndexerCase) -> list[Comparison]:
        inputs = make(case)
        scores = calls.indexer_logits(inputs, backend)
        return judge_indexer.check_selection(inputs, scores, backend)

    def call_of(operation: Any, case: IndexerCase) -> object:
        return operation(make(case), backend)

    def bound_of(case: IndexerCase) -> list[Comparison]:
        return judge_indexer.check_bound(make(case), backend)

    bound = IndexerCase("3 rows, bound", (600, 100, 0), 512, num_heads=16)
    runs: tuple[tuple[str, Any, Any, list[IndexerCase]], ...] = (
        ("indexer_logits", calls.indexer_logits, scores_of, cases.INDEXER),
        ("dsa_topk_indexer", calls.dsa_topk_indexer, selection_of, cases.INDEXER),
        ("dsa_topk_indexer", calls.dsa_topk_indexer, bound_of, [bound]),
    )
    return [
        Check(
            name, case.name, partial(call_of, call, case), partial(check, case), sum(case.seq_lens)
        )
        for name, call, check, of_run in runs
        for case in of_run
    ]


def _prefill_checks(seed: int, backend: str, device: str) -> list[Check]:
    make = cache(partial(make_prefill_inputs, seed=seed, device=device))

    def scores_of(case: PrefillCase) -> list[Comparison]:
        return judge_prefill.check_prefill_scores(make(case), backend)[1]

    def selection_of(case: PrefillCase) -> list[Comparison]:
        inputs = make(case)
        scores = calls.prefill_logits(inputs, backend)
        return judge_prefill.check_prefill_selection(inputs, scores, backend)

    def call_of(operation: Any, case: PrefillCase) -> object:
        return operation(make(case), backend)

    runs = (
        ("prefill_logits", calls.prefill_logits, scores_of),
        ("dsa_topk_prefill", calls.dsa_topk_prefill, selection_of),
    )
    return [
        Check(
            name,
            case.name,
            partial(call_of, call, case),
            partial(check, case),
            sum(end - start for start, end in case.ranges),
        )
        for name, call, check in runs
        for case in cases.PREFILL
    ]


def _call_target(inputs: IndexerTrainingInputs, backend: str) -> object:
    """Call it with an lse of zeros."""
    q = inputs.attention.q
    lse = q.new_zeros(q.shape[:2], dtype=inputs.grad_scores.dtype)
    return calls.attention_target(inputs, lse, backend)


def _call_kl(inputs: IndexerTrainingInputs, backend: str) -> object:
    """Call it with arbitrary scores and target."""
    scores = inputs.grad_scores
    return flashdsa.indexer_kl(scores, scores.abs(), backend=backend)


def _call_kl_backward(inputs: IndexerTrainingInputs, backend: str) -> object:
    """Call it with arbitrary scores, target and gradient."""
    scores = inputs.grad_scores
    return calls.indexer_kl_bwd(scores, scores.abs(), scores[:, 0].contiguous(), backend)


def _call_kl_loss(inputs: IndexerTrainingInputs, backend: str) -> object:
    """Call it with an lse of zeros."""
    q = inputs.attention.q
    lse = q.new_zeros(q.shape[:2], dtype=inputs.grad_scores.dtype)
    return calls.indexer_kl_loss(inputs, lse, backend)


def _training_checks(seed: int, backend: str, device: str) -> list[Check]:
    runs: dict[str, tuple[Any, Any]] = {
        "attention_target": (_call_target, judge.check_target),
        "indexer_scores": (calls.indexer_scores, judge.check_index_scores),
        "indexer_bwd": (calls.indexer_bwd, judge.check_index_backward),
        "indexer_kl": (_call_kl, judge.check_kl),
        "indexer_kl_bwd": (_call_kl_backward, judge.check_kl_backward),
        "indexer_kl_loss": (_call_kl_loss, judge_composed.check_kl_loss),
    }
    rows: list[tuple[str, IndexerTrainingCase, Any, Any]] = [
        (name, case, call, check) for name, (call, check) in runs.items() for case in cases.TRAINING
    ]
    call, check = runs["indexer_bwd"]
    for case in cases.INDEX_BACKWARD:
        order = {"deterministic": case.deterministic}
        rows.append(("indexer_bwd", case.training, partial(call, **order), partial(check, **order)))

    make = cache(partial(make_indexer_training_inputs, seed=seed, device=device))

    def build(operation: str, case: IndexerTrainingCase, call: Any, check: Any) -> Check:
        return Check(
            operation,
            case.name,
            lambda: call(make(case), backend),
            lambda: check(make(case), backend),
            case.attention.num_queries * case.attention.topk,
        )

    return [build(*row) for row in rows]


def _small_checks(seed: int, backend: str, device: str) -> list[Check]:
    """topk_indices, and quantization and the cache: exact operations on plain random data."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(4, 6000, generator=generator)
    coarse = (scores * 2).round() / 2
    coarse[:, ::5] = torch.nan
    lengths = torch.tensor([6000, 0, 2048, 3001], dtype=torch.int32).to(device)
    wide_k = torch.randn(1000, 128, generator=generator).to(device)
    wide_q = torch.randn(8, 64, 128, generator=generator).to(device)
    k, q = wide_k.to(torch.bfloat16), wide_q.to(torch.bfloat16)
    weights = torch.randn(8, 64, generator=generator).to(device)
    slots = torch.randperm(20 * 64, generator=generator)[:1000]
    padded = torch.where(torch.arange(1000) % 9 == 4, -1, slots).to(device)
    cache = torch.randint(256, (20, 64, 1, 132), generator=generator).to(torch.uint8).to(device)

    rows: list[tuple[str, str, Callable[[], list[Comparison]]]] = []
    for name, values, topk, by_score in (
        ("2048 of 6000", scores, 2048, False),
        ("512 of 6000", scores, 512, False),
        ("1000 of 6000", scores, 1000, False),
        ("ties and NaN", coarse, 2048, False),
        ("ties and NaN, 1024", coarse, 1024, False),
        ("ties and NaN, sorted", coarse, 2048, True),
    ):
        check = partial(
            judge_indexer.check_topk,
            values.to(device),
            lengths,
            topk,
            backend,
            sorted=by_score,
        )
        rows.append(("topk_indices", name, check))
    for dtype, some_k, some_q in (("", k, q), (", fp32", wide_k, wide_q)):
        write_slots = padded.int() if dtype else padded
        rows += [
            (
                "quantize_index_k",
                f"1000 keys{dtype}",
                partial(judge_indexer.check_quantize_k, some_k, backend),
            ),
            (
                "quantize_index_q",
                f"8 x 64 heads{dtype}",
                partial(judge_indexer.check_quantize_q, some_q, weights, backend),
            ),
            (
                "write_index_k_cache",
                f"1000 slots, some padding{dtype}",
                partial(judge_indexer.check_cache_write, some_k, write_slots, cache, backend),
            ),
        ]
    read = partial(judge_indexer.check_cache_read, cache, slots.to(device), backend)
    rows.append(("read_index_k_cache", "1000 slots", read))
    # What these call is so little that the judge serves as the call.
    return [Check(name, case, check, check) for name, case, check in rows]


def _composed_checks(seed: int, backend: str, device: str) -> list[Check]:
    rows: list[tuple[str, str, Callable[[], list[Comparison]]]] = [
        (
            "merge_attention",
            f"3 parts, {name}",
            partial(
                judge_composed.check_merge,
                SparseMlaCase("parts", 6, 200, 16, 48, dtype=dtype),
                seed,
                device,
            ),
        )
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
    ]
    for name in ("lse_for_merge", "lse_to_base2", "lse_from_base2"):
        convert = partial(judge_composed.check_lse_conversions, name, seed, device)
        rows.append((name, "8 x 16, infinities", convert))
    rows += [
        (
            "quantize_kv",
            "300 rows of any size",
            partial(judge_composed.check_quantize_kv, seed, device),
        ),
        (
            "write_kv_cache",
            "50 rows, some padding",
            partial(judge_composed.check_write_kv_cache, seed, device),
        ),
        ("read_kv_cache", "60 slots", partial(judge_composed.check_read_kv_cache, seed, device)),
        (
            "causal_ranges",
            "5 sequences, one empty",
            partial(judge_composed.check_causal_ranges, device),
        ),
        (
            "fake_quantize_index",
            "160 vectors",
            partial(judge_composed.check_fake_quantize, seed, device),
        ),
    ]
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        dense = partial(judge_composed.check_dense_kl_loss, dtype, seed, device)
        rows.append(("indexer_kl_loss_dense", f"9 queries of 80 keys, {name}", dense))
    return [Check(name, case, check, check) for name, case, check in rows]
