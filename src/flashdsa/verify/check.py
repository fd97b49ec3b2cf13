"""`flashdsa check`: the public operations on fresh random inputs, at real sizes and edges."""

import logging
import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch

import flashdsa
from flashdsa.backends.catalog import registry
from flashdsa.errors import UnsupportedError
from flashdsa.verify import judge_indexer, judge_prefill, judge_sparse_mla
from flashdsa.verify import judge_indexer_training as judge
from flashdsa.verify.cases import (
    IndexerCase,
    IndexerTrainingCase,
    PrefillCase,
    SparseMlaCase,
    make_indexer_inputs,
    make_indexer_training_inputs,
    make_prefill_inputs,
    make_sparse_mla_inputs,
)
from flashdsa.verify.compare import Comparison
from flashdsa.verify.emulated_progress import CaseProgress
from flashdsa.verify.prefill_cases import causal

OPERATIONS = (
    "sparse_mla_fwd",
    "mla_bwd",
    "sparse_mla",
    "indexer_logits",
    "dsa_topk_indexer",
    "topk_indices",
    "prefill_logits",
    "dsa_topk_prefill",
    "quantize_index_k",
    "quantize_index_q",
    "write_index_k_cache",
    "read_index_k_cache",
    "attention_target",
    "indexer_scores",
    "indexer_bwd",
    "indexer_kl",
    "indexer_kl_bwd",
)

logger = logging.getLogger("flashdsa.check")
ProgressHook = Callable[[float, int, str], None]


@dataclass(frozen=True)
class CheckRow:
    """One output of one case: its error, the limit it must keep, and whether every rule held."""

    operation: str
    case: str
    output: str
    error: float
    limit: float
    passed: bool
    seconds: float
    """Of the whole case, reference included."""
    message: str


@dataclass(frozen=True)
class _Check:
    operation: str
    case: str
    run: Callable[[], list[Comparison]]
    work: int = 1
    """Grows with the time that it takes; smaller ones run first."""


# fmt: off
_SPARSE_MLA = [
    # name, S, S_kv, H, topk
    SparseMlaCase("one query, 64 of 200 keys", 1, 200, 128, 64, invalid=True, poison=True),
    SparseMlaCase("model sizes: 4 x 128 heads, 2048 of 8192 keys", 4, 8192, 128, 2048),
    SparseMlaCase("half the heads, sink, lengths", 4, 4096, 64, 1024, attn_sink="finite",
                  topk_length=True),
    SparseMlaCase("invalid slots over NaN rows, duplicates", 6, 500, 16, 96, duplicates=True,
                  invalid=True, empty_rows=True, topk_length=True, poison=True,
                  attn_sink="infinite"),
    SparseMlaCase("logits to 60", 6, 500, 32, 128, logit_scale=60.0, rounded_dots=True,
                  from_exact_o=True),
    SparseMlaCase("logits to 1e4", 6, 500, 32, 128, logit_scale=1e4),
    SparseMlaCase("logits near -1e4", 6, 500, 32, 128, logit_shift=-1e4),
    SparseMlaCase("fp32", 4, 1000, 32, 256, dtype=torch.float32),
    SparseMlaCase("fp64", 4, 1000, 32, 256, dtype=torch.float64),
    SparseMlaCase("other dims: 24/16", 8, 100, 5, 33, d_qk=24, d_v=16),
]
_INDEXER = [
    IndexerCase("one row, 512 of 600 tokens", (600,), 512),
    IndexerCase("model sizes: 2048 of 8192 tokens", (8192, 2049, 5000, 100), 2048),
    IndexerCase("sorted", (3000, 700), 2048, sorted=True),
    IndexerCase("page edges", (0, 1, 63, 64, 65, 127), 32),
    IndexerCase("ties, NaN keys, negative weights", (500, 900), 200, plateaus=True,
                nan_keys=True, negative_weights=True, repeated_pages=True),
]
_PREFILL = [
    PrefillCase("16 heads, 512 of 600 keys", causal(8, 600), 512, num_heads=16),
    PrefillCase("model sizes: 2048 of 4096 keys", causal(4, 4096), 2048),
    PrefillCase("model sizes, bf16", causal(4, 4096), 2048, num_heads=32, dtype=torch.bfloat16),
    PrefillCase("packed sequences, sorted", (*causal(6, 700), *causal(5, 40, 700)), 512,
                sorted=True),
    PrefillCase("ties, NaN keys, negative weights", causal(6, 900), 512, num_heads=32,
                plateaus=True, nan_keys=True, negative_weights=True),
]
_TRAINING = [
    IndexerTrainingCase(
        SparseMlaCase("64 index heads, 256 of 1024 keys", 4, 1024, 64, 256), index_heads=64
    ),
    IndexerTrainingCase(
        SparseMlaCase("invalid slots over NaN keys", 6, 300, 16, 96, duplicates=True, invalid=True,
                      empty_rows=True, topk_length=True, poison=True), index_heads=32
    ),
    IndexerTrainingCase(
        SparseMlaCase("index fp32", 4, 200, 16, 64, dtype=torch.float32), index_heads=16
    ),
]
# fmt: on


def _sparse_mla_checks(seed: int, backend: str, device: str) -> list[_Check]:
    runs = {
        "sparse_mla_fwd": judge_sparse_mla.check_forward,
        "mla_bwd": judge_sparse_mla.check_backward,
        "sparse_mla": judge_sparse_mla.check_autograd,
    }

    def check(operation: str, case: SparseMlaCase) -> _Check:
        def run() -> list[Comparison]:
            return runs[operation](make_sparse_mla_inputs(case, seed, device), backend)

        work = case.num_queries * case.num_heads * case.topk * case.d_qk
        return _Check(operation, case.name, run, work)

    return [check(operation, case) for operation in runs for case in _SPARSE_MLA]


def _indexer_checks(seed: int, backend: str, device: str) -> list[_Check]:
    def scores_of(case: IndexerCase) -> Callable[[], list[Comparison]]:
        def run() -> list[Comparison]:
            return judge_indexer.check_scores(make_indexer_inputs(case, seed, device), backend)[1]

        return run

    def selection_of(case: IndexerCase) -> Callable[[], list[Comparison]]:
        def run() -> list[Comparison]:
            inputs = make_indexer_inputs(case, seed, device)
            operands = inputs.operands_of_rows
            scores = flashdsa.indexer_logits(*operands, inputs.max_len, backend=backend)
            return judge_indexer.check_selection(inputs, scores, backend)

        return run

    judged = (("indexer_logits", scores_of), ("dsa_topk_indexer", selection_of))
    return [
        _Check(operation, case.name, make(case), sum(case.seq_lens))
        for operation, make in judged
        for case in _INDEXER
    ]


def _prefill_checks(seed: int, backend: str, device: str) -> list[_Check]:
    def scores_of(case: PrefillCase) -> list[Comparison]:
        inputs = make_prefill_inputs(case, seed, device)
        return judge_prefill.check_prefill_scores(inputs, backend)[1]

    def selection_of(case: PrefillCase) -> list[Comparison]:
        inputs = make_prefill_inputs(case, seed, device)
        scores = flashdsa.prefill_logits(*inputs.operands, backend=backend, **inputs.options)
        return judge_prefill.check_prefill_selection(inputs, scores, backend)

    return [
        _Check(
            operation,
            case.name,
            partial(run, case),
            sum(end - start for start, end in case.ranges),
        )
        for operation, run in (("prefill_logits", scores_of), ("dsa_topk_prefill", selection_of))
        for case in _PREFILL
    ]


def _training_checks(seed: int, backend: str, device: str) -> list[_Check]:
    runs = {
        "attention_target": judge.check_target,
        "indexer_scores": judge.check_index_scores,
        "indexer_bwd": judge.check_index_backward,
        "indexer_kl": judge.check_kl,
        "indexer_kl_bwd": judge.check_kl_backward,
    }

    def check(operation: str, case: IndexerTrainingCase) -> _Check:
        def run() -> list[Comparison]:
            inputs = make_indexer_training_inputs(case, seed, device)
            return runs[operation](inputs, backend)

        return _Check(operation, case.name, run, case.attention.num_queries * case.attention.topk)

    return [check(operation, case) for operation in runs for case in _TRAINING]


def _small_checks(seed: int, backend: str, device: str) -> list[_Check]:
    """topk_indices, and quantization and the cache: exact operations on plain random data."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(4, 6000, generator=generator)
    coarse = (scores * 2).round() / 2
    coarse[:, ::5] = torch.nan
    lengths = torch.tensor([6000, 0, 2048, 3001], dtype=torch.int32).to(device)
    k = torch.randn(1000, 128, generator=generator).to(torch.bfloat16).to(device)
    q = torch.randn(8, 64, 128, generator=generator).to(torch.bfloat16).to(device)
    weights = torch.randn(8, 64, generator=generator).to(device)
    slots = torch.randperm(20 * 64, generator=generator)[:1000]
    padded = torch.where(torch.arange(1000) % 9 == 4, -1, slots).to(device)
    cache = torch.randint(256, (20, 64, 1, 132), generator=generator).to(torch.uint8).to(device)

    def topk(values: torch.Tensor, by_score: bool) -> Callable[[], list[Comparison]]:
        return lambda: judge_indexer.check_topk(
            values.to(device), lengths, 2048, backend, sorted=by_score
        )

    return [
        _Check("topk_indices", "2048 of 6000", topk(scores, False)),
        _Check("topk_indices", "ties and NaN", topk(coarse, False)),
        _Check("topk_indices", "ties and NaN, sorted", topk(coarse, True)),
        _Check("quantize_index_k", "1000 keys", lambda: judge_indexer.check_quantize_k(k, backend)),
        _Check(
            "quantize_index_q",
            "8 x 64 heads",
            lambda: judge_indexer.check_quantize_q(q, weights, backend),
        ),
        _Check(
            "write_index_k_cache",
            "1000 slots, some padding",
            lambda: judge_indexer.check_cache_write(k, padded, cache, backend),
        ),
        _Check(
            "read_index_k_cache",
            "1000 slots",
            lambda: judge_indexer.check_cache_read(cache, slots.to(device), backend),
        ),
    ]


def _rows_of(check: _Check) -> list[CheckRow]:
    start = time.perf_counter()
    verdicts = check.run()
    seconds = time.perf_counter() - start
    return [
        CheckRow(
            check.operation,
            check.case,
            verdict.output,
            *verdict.headline,
            verdict.passed,
            seconds,
            verdict.message,
        )
        for verdict in verdicts
    ]


def _served(backend: str, operations: Collection[str]) -> tuple[str, ...]:
    """Those operations that the backend has in this version; a warning names the others."""
    has = {i.operation.value for i in registry.implementations() if i.backend == backend}
    needs = {"sparse_mla": {"sparse_mla_fwd", "mla_bwd"}}
    served = tuple(name for name in operations if needs.get(name, {name}) <= has)
    lacking = ", ".join(name for name in operations if name not in served)
    if not served:
        raise UnsupportedError(f"backend {backend!r} has no implementation of {lacking}")
    if lacking:
        logger.warning("not checked, as %s has no implementation: %s", backend, lacking)
    return served


def run_checks(
    backend: str = "cpu",
    operations: Collection[str] | None = None,
    seed: int | None = 0,
    on_progress: ProgressHook | None = None,
    quick: bool = False,
) -> list[CheckRow]:
    """Judge a backend's operations on random inputs against the float64 reference.

    Args:
        backend: the name of one, as the operations take it; not "auto".
        operations: names out of `OPERATIONS`; None for all of them.
        seed: of the inputs; None draws one.
        on_progress: called with (checks done, checks in all, what runs now or "done"); of the check
            that runs the part that is done, where that is known.
        quick: only the smallest case of each operation that the backend takes.

    Returns:
        One row per output, in the order of `OPERATIONS`, small cases first.

    Raises:
        ValueError: an operation's name is unknown.
        NotImplementedError: the backend takes none of the cases; those that it does not take are
            left out with a warning in the log.
    """
    wanted = OPERATIONS if operations is None else tuple(operations)
    unknown = [name for name in wanted if name not in OPERATIONS]
    if unknown:
        raise ValueError(
            f"operations: no {', '.join(unknown)}; expected some of {', '.join(OPERATIONS)}"
        )
    wanted = _served(backend, wanted)
    seed = random.randrange(2**31) if seed is None else seed
    device = "cuda" if backend.startswith("sm") else "cpu"
    checks = [
        check
        for build in (
            _sparse_mla_checks,
            _indexer_checks,
            _prefill_checks,
            _small_checks,
            _training_checks,
        )
        for check in build(seed, backend, device)
        if check.operation in wanted
    ]
    checks.sort(key=lambda check: (OPERATIONS.index(check.operation), check.work))
    rows: list[CheckRow] = []
    tell = on_progress or (lambda done, total, what: None)
    now = (0, "")

    def tell_more(share: float, text: str) -> None:
        done, what = now
        part = f"about {share:.0%} of " if share else ""  # in front: a narrow screen cuts the end
        tell(done + share, len(checks), f"{part}{what} ({text})")

    progress = CaseProgress(tell_more)
    refused: list[UnsupportedError] = []
    for done, check in enumerate(checks):
        if quick and any(row.operation == check.operation for row in rows):
            continue
        now = (done, f"{check.operation}: {check.case}")
        tell(done, len(checks), now[1])
        try:
            with progress.watch(backend, check.operation, check.work):
                rows += _rows_of(check)
        except UnsupportedError as error:
            if backend == "cpu":  # which takes everything
                raise
            refused.append(error)
            logger.warning("not checked: %s, %s: %s", check.operation, check.case, error)
    if refused and not rows:
        raise refused[0]
    tell(len(checks), len(checks), "done")
    return rows
