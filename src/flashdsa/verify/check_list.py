"""The checks of `flashdsa check`: each operation on each of its cases, its call, its judge."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

import flashdsa
from flashdsa import ops
from flashdsa.verify import (
    calls,
    judge_composed,
    judge_entries,
    judge_indexer,
    judge_indexer_training,
    judge_sparse_mla,
)
from flashdsa.verify import check_cases as cases
from flashdsa.verify.compare import Comparison
from flashdsa.verify.entries_cases import ENTRIES_CASES, EntriesInputs, make_entries_inputs
from flashdsa.verify.indexer_cases import IndexerCase, IndexerInputs, make_indexer_inputs
from flashdsa.verify.indexer_training_cases import (
    IndexerTrainingCase,
    IndexerTrainingInputs,
    make_indexer_training_inputs,
)
from flashdsa.verify.prefill_cases import PrefillCase, PrefillInputs, make_prefill_inputs
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, SparseMlaInputs, make_sparse_mla_inputs

COMPOSED = (
    "merge_attention",
    "lse_for_merge",
    "lse_to_base2",
    "lse_from_base2",
    "quantize_kv",
    "write_kv_cache",
    "read_kv_cache",
    "causal_ranges",
    "expand_blocks",
    "fake_quantize_index",
    "indexer_kl_loss_dense",
    "rotate_tail",
)
"""Operations without a backend: products of torch where their tensors are."""
OPERATIONS = (*ops.OPERATIONS, "sparse_mla", "indexer_kl_loss", *COMPOSED)


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


def each(
    runs: Iterable[tuple[str, Any, Any]],
    cases: Iterable[Any],
    make: Callable[[Any], Any],
    backend: str,
    work: Callable[[Any], int],
) -> list[Check]:
    """Operations on cases.

    Args:
        runs: the operation, its call and its judge, both of inputs and the backend.
        make: gives a case's inputs.
        work: a case's. None has less than the first one, a plain case, which `--quick` takes.
    """
    cases = list(cases)
    least = work(cases[0])

    def build(operation: str, call: Any, judge: Any, case: Any) -> Check:
        return Check(
            operation,
            case.name,
            lambda: call(make(case), backend),
            lambda: judge(make(case), backend),
            max(work(case), least),
        )

    return [build(*run, case) for run in runs for case in cases]


def _attention(seed: int, backend: str, device: str) -> list[Check]:
    """Those of the forward's lists of cases, then of the backward's own."""
    make = cache(partial(make_sparse_mla_inputs, seed=seed, device=device))
    forward = ("sparse_mla_fwd", calls.sparse_mla_fwd, judge_sparse_mla.check_forward)
    by_autograd = (
        ("sparse_mla", calls.sparse_mla, judge_sparse_mla.check_autograd),
        ("mla_bwd", _call_backward, judge_sparse_mla.check_backward),
    )
    out = ("sparse_mla_fwd_out", calls.sparse_mla_fwd_out, judge_sparse_mla.check_forward_out)
    checks = [
        *each([forward], [*cases.ATTENTION, *cases.FORWARD], make, backend, _attention_work),
        *each(by_autograd, cases.ATTENTION, make, backend, _attention_work),
        *each([out], cases.INTO_BUFFERS, make, backend, _attention_work),
    ]
    for case in cases.BACKWARD:
        options: dict[str, Any] = {"deterministic": case.deterministic, "dkv_dtype": case.dkv_dtype}
        call = partial(_call_backward, **options)
        judge = partial(judge_sparse_mla.check_backward, **options)
        checks += each([("mla_bwd", call, judge)], [case.attention], make, backend, _attention_work)
    return checks


def _attention_work(case: SparseMlaCase) -> int:
    return case.num_queries * case.num_heads * case.topk * case.d_qk


def _call_backward(inputs: SparseMlaInputs, backend: str, **options: Any) -> object:
    """Call the backward with O and lse of zeros."""
    O = torch.zeros_like(inputs.do)
    lse = O.new_zeros(O.shape[:2], dtype=judge_sparse_mla.accumulator_dtype(inputs))
    return calls.mla_bwd(inputs, O, lse, backend, **options)


def _composed(seed: int, backend: str, device: str) -> list[Check]:
    """A case or two of each function."""
    on = (seed, device)
    rows: list[tuple[str, str, Callable[[], list[Comparison]]]] = []
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        parts = SparseMlaCase("parts", 6, 200, 16, 48, dtype=dtype)
        merge = partial(judge_composed.check_merge, parts, *on)
        dense = partial(judge_composed.check_dense_kl_loss, dtype, *on)
        rows.append(("merge_attention", f"3 parts, {name}", merge))
        rows.append(("indexer_kl_loss_dense", f"9 queries of 80 keys, {name}", dense))
    for name in ("lse_for_merge", "lse_to_base2", "lse_from_base2"):
        convert = partial(judge_composed.check_lse_conversions, name, *on)
        rows.append((name, "8 x 16, infinities", convert))
    causal = partial(judge_composed.check_causal_ranges, device)
    rows.append(("causal_ranges", "5 sequences, one empty", causal))
    for name, case, check in (
        ("quantize_kv", "300 rows of any size", judge_composed.check_quantize_kv),
        ("write_kv_cache", "50 rows, some padding", judge_composed.check_write_kv_cache),
        ("read_kv_cache", "60 slots", judge_composed.check_read_kv_cache),
        ("expand_blocks", "12 queries", judge_composed.check_expand_blocks),
        ("fake_quantize_index", "160 vectors", judge_composed.check_fake_quantize),
    ):
        rows.append((name, case, partial(check, *on)))
    return [Check(name, case, check, check) for name, case, check in rows]


def _entries(seed: int, backend: str, device: str) -> list[Check]:
    """Forward and backward of every case; the rotation in two dtypes."""
    runs = (
        ("compress_kv", _call_entries, judge_entries.check_forward),
        ("compress_kv_bwd", _call_entries_bwd, judge_entries.check_backward),
    )
    make = partial(make_entries_inputs, seed=seed, device=device)
    found = each(runs, ENTRIES_CASES, make, backend, lambda case: max(1, case.tokens) * case.d)
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        rotate = partial(judge_entries.check_rotation, dtype, seed, device)
        found.append(Check("rotate_tail", f"7 rows of 3 heads, {name}", rotate, rotate))
    return found


def _call_entries(x: EntriesInputs, backend: str) -> object:
    """Call it without and with a state."""
    options = {"cu_seqlens": x.cu_seqlens, "backend": backend, **x.options}
    whole = flashdsa.compress_kv(*x.operands, **options)
    rows = x.case.ratio * (1 + x.case.overlap)
    options["state"] = x.kv.new_zeros(len(x.case.lengths), rows, 2, x.kv.shape[1])
    options["seen"] = torch.zeros_like(x.cu_seqlens[1:])
    return whole, flashdsa.compress_kv(*x.operands, **options)


def _call_entries_bwd(x: EntriesInputs, backend: str) -> object:
    return flashdsa.compress_kv_bwd(
        x.kv, x.gate, x.grad_entries, x.ape, cu_seqlens=x.cu_seqlens, backend=backend, **x.options
    )


def _indexer(seed: int, backend: str, device: str) -> list[Check]:
    """Those of each list of cases; single steps have plain random inputs."""
    return [
        *_paged(seed, backend, device),
        *_over_shared_keys(seed, backend, device),
        *_single_steps(seed, backend, device),
    ]


def _paged(seed: int, backend: str, device: str) -> list[Check]:
    make = cache(partial(make_indexer_inputs, seed=seed, device=device))
    runs = (
        ("indexer_logits", calls.indexer_logits, _judge_scores),
        ("dsa_topk_indexer", calls.dsa_topk_indexer, _judge_selection),
    )
    bound = IndexerCase("3 rows, bound", (600, 100, 0), 512, num_heads=16)
    run_bound = ("dsa_topk_indexer", calls.dsa_topk_indexer, judge_indexer.check_bound)
    return [
        *each(runs, cases.INDEXER, make, backend, _tokens),
        *each([run_bound], [bound], make, backend, _tokens),
    ]


def _tokens(case: IndexerCase) -> int:
    return sum(case.seq_lens)


def _judge_scores(inputs: IndexerInputs, backend: str) -> list[Comparison]:
    return judge_indexer.check_scores(inputs, backend)[1]


def _judge_selection(inputs: IndexerInputs, backend: str) -> list[Comparison]:
    scores = calls.indexer_logits(inputs, backend)
    return judge_indexer.check_selection(inputs, scores, backend)


def _over_shared_keys(seed: int, backend: str, device: str) -> list[Check]:
    make = cache(partial(make_prefill_inputs, seed=seed, device=device))
    runs = (
        ("prefill_logits", calls.prefill_logits, _judge_prefill_scores),
        ("dsa_topk_prefill", calls.dsa_topk_prefill, _judge_prefill_selection),
    )
    return each(runs, cases.PREFILL, make, backend, _keys_seen)


def _keys_seen(case: PrefillCase) -> int:
    return sum(end - start for start, end in case.ranges)


def _judge_prefill_scores(inputs: PrefillInputs, backend: str) -> list[Comparison]:
    return judge_indexer.check_prefill_scores(inputs, backend)[1]


def _judge_prefill_selection(inputs: PrefillInputs, backend: str) -> list[Comparison]:
    scores = calls.prefill_logits(inputs, backend)
    return judge_indexer.check_prefill_selection(inputs, scores, backend)


def _single_steps(seed: int, backend: str, device: str) -> list[Check]:
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
    many = torch.randn(140, 600, generator=generator)
    many_lengths = (4 * torch.arange(len(many), dtype=torch.int32)).to(device)

    rows: list[tuple[str, str, Callable[[], list[Comparison]]]] = []
    for name, values, own, topk, by_score in (
        ("2048 of 6000", scores, lengths, 2048, False),
        ("512 of 6000", scores, lengths, 512, False),
        ("1000 of 6000", scores, lengths, 1000, False),
        ("140 rows", many, many_lengths, 512, False),
        ("ties and NaN", coarse, lengths, 2048, False),
        ("ties and NaN, 1024", coarse, lengths, 1024, False),
        ("ties and NaN, sorted", coarse, lengths, 2048, True),
        ("one score", scores[:1, :1].contiguous(), torch.ones_like(lengths[:1]), 512, False),
    ):
        check = partial(
            judge_indexer.check_topk, values.to(device), own, topk, backend, sorted=by_score
        )
        rows.append(("topk_indices", name, check))
    for dtype, some_k, some_q in (("", k, q), (", fp32", wide_k, wide_q)):
        write_slots = padded.int() if dtype else padded
        of_k = partial(judge_indexer.check_quantize_k, some_k, backend)
        of_q = partial(judge_indexer.check_quantize_q, some_q, weights, backend)
        write = partial(judge_indexer.check_cache_write, some_k, write_slots, cache, backend)
        rows += [
            ("quantize_index_k", f"1000 keys{dtype}", of_k),
            ("quantize_index_q", f"8 x 64 heads{dtype}", of_q),
            ("write_index_k_cache", f"1000 slots, some padding{dtype}", write),
        ]
    in_fp4 = cache[..., :68].contiguous()
    in_fp4.flatten(1)[:, 4096:] %= 20  # exponents that may be far apart
    for name, pages in (("1000 slots", cache), ("1000 slots of 68 bytes", in_fp4)):
        read = partial(judge_indexer.check_cache_read, pages, slots.to(device), backend)
        rows.append(("read_index_k_cache", name, read))
    write = partial(judge_indexer.check_cache_write, k, padded, in_fp4, backend)
    rows.append(("write_index_k_cache", "1000 slots of 68 bytes", write))
    of_k = partial(judge_indexer.check_quantize_k, wide_k, backend, mxfp4=True)
    of_q = partial(judge_indexer.check_quantize_q, q, weights, backend, mxfp4=True)
    rows += [("quantize_index_k", "MXFP4", of_k), ("quantize_index_q", "MXFP4", of_q)]
    of_k = partial(judge_indexer.check_quantize_k, wide_k, backend, scale="ue8m0")
    of_q = partial(judge_indexer.check_quantize_q, q, weights, backend, scale="ue8m0")
    write = partial(judge_indexer.check_cache_write, k, padded, cache, backend, scale="ue8m0")
    rows += [
        ("quantize_index_k", "powers of two", of_k),
        ("quantize_index_q", "powers of two", of_q),
        ("write_index_k_cache", "powers of two", write),
    ]
    # What these call is so little that the judge serves as the call.
    return [Check(name, case, check, check) for name, case, check in rows]


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


def _training(seed: int, backend: str, device: str) -> list[Check]:
    """Each operation on the cases of training; `indexer_bwd` on its own, too."""
    make = cache(partial(make_indexer_training_inputs, seed=seed, device=device))
    runs = (
        ("attention_target", _call_target, judge_indexer_training.check_target),
        ("indexer_scores", calls.indexer_scores, judge_indexer_training.check_index_scores),
        ("indexer_bwd", calls.indexer_bwd, judge_indexer_training.check_index_backward),
        ("indexer_kl", _call_kl, judge_indexer_training.check_kl),
        ("indexer_kl_bwd", _call_kl_backward, judge_indexer_training.check_kl_backward),
        ("indexer_kl_loss", _call_kl_loss, judge_composed.check_kl_loss),
    )
    checks = each(runs, cases.TRAINING, make, backend, _training_work)
    for case in cases.INDEX_BACKWARD:
        call, check = (
            partial(one, deterministic=case.deterministic)
            for one in (calls.indexer_bwd, judge_indexer_training.check_index_backward)
        )
        checks += each(
            [("indexer_bwd", call, check)], [case.training], make, backend, _training_work
        )
    return checks


def _training_work(case: IndexerTrainingCase) -> int:
    return case.attention.num_queries * case.attention.topk


def checks_of(seed: int, backend: str, device: str) -> list[Check]:
    """All of them, of inputs on the device, smallest first within an operation."""
    families = (_attention, _composed, _entries, _indexer, _training)
    checks = [check for family in families for check in family(seed, backend, device)]
    return sorted(checks, key=lambda check: (OPERATIONS.index(check.operation), check.work))
