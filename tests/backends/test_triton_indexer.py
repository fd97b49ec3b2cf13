"""The indexer's kernels in Triton on ptxemu: every path against float64, and compiled for more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa import reference
from flashdsa.backends.emulated.devices import small_device
from flashdsa.backends.emulated.runner import Emulator, emulation, running_on
from flashdsa.backends.triton import indexer, indexer_training, launch
from flashdsa.verify import judge_composed, judge_indexer, judge_indexer_training
from flashdsa.verify.compare import Comparison
from flashdsa.verify.indexer_cases import IndexerCase, make_indexer_inputs
from flashdsa.verify.indexer_training_cases import IndexerTrainingCase, make_indexer_training_inputs
from flashdsa.verify.prefill_cases import PrefillCase, causal, make_prefill_inputs
from flashdsa.verify.sparse_mla_cases import SparseMlaCase

pytest.importorskip("triton")
pytest.importorskip("ptxemu.cutedsl", reason="needs the emulator")

TRITON, SEED = "emulate-triton", 1
RUN = ((8, 0), (9, 0), pytest.param((12, 0), marks=pytest.mark.slow))
"""Compute capabilities whose code ptxemu runs; products of 12.0 are those of 8.0."""
COMPILED = ((8, 9), (10, 0), pytest.param((12, 0), marks=pytest.mark.slow))
"""Those whose code is compiled; that for 10.0 lacks fences of tensor memory that PTX asks for."""
DECODE = IndexerCase("", (70, 71, 130, 0), 40, num_heads=20, next_n=2, plateaus=True, nan_keys=True,
                     negative_weights=True, repeated_pages=True)  # fmt: skip
SLOTS = IndexerCase("", (150, 49), 60, num_heads=16, table_page_size=4, positions=True, sorted=True,
                    plateaus=True, strided=True, int8_cache=True)  # fmt: skip
PREFILL = PrefillCase("", (*causal(3, 60), *causal(2, 30, 60)), 25, num_heads=20, sorted=True,
                      nan_keys=True, strided=True)  # fmt: skip
TRAINING = IndexerTrainingCase(
    SparseMlaCase("", 3, 60, 16, 40, duplicates=True, invalid=True, empty_rows=True,
                  topk_length=True, poison=True, attn_sink="infinite"), index_heads=20
)  # fmt: skip


@pytest.fixture(params=RUN, ids=str)
def device(request: pytest.FixtureRequest) -> Any:
    with emulation(small_device(request.param)) as emulator:
        yield emulator


@pytest.fixture
def a100() -> Any:
    with emulation(small_device((8, 0))) as emulator:
        yield emulator


def wrong(verdicts: Sequence[Comparison]) -> list[Comparison]:
    return [verdict for verdict in verdicts if not verdict.passed]


def decoded(case: IndexerCase) -> list[Comparison]:
    inputs = make_indexer_inputs(case, SEED)
    scores, verdicts = judge_indexer.check_scores(inputs, TRITON)
    return [*verdicts, *judge_indexer.check_selection(inputs, scores, TRITON)]


def prefilled(case: PrefillCase) -> list[Comparison]:
    inputs = make_prefill_inputs(case, SEED)
    scores, verdicts = judge_indexer.check_prefill_scores(inputs, TRITON)
    return [*verdicts, *judge_indexer.check_prefill_selection(inputs, scores, TRITON)]


def trained(case: IndexerTrainingCase) -> list[Comparison]:
    inputs = make_indexer_training_inputs(case, SEED)
    return [
        *judge_indexer_training.check_target(inputs, TRITON),
        *judge_indexer_training.check_index_scores(inputs, TRITON),
        *judge_indexer_training.check_index_backward(inputs, TRITON),
    ]


@pytest.mark.usefixtures("a100")
def test_weights_of_one_value_are_not_rounded() -> None:
    """All gradients of keys would be too long, or too short."""
    attention = SparseMlaCase("", 3, 60, 2, 40, d_qk=24, d_v=16)
    case = IndexerTrainingCase(attention, index_heads=16, shared_weights=True)
    inputs = make_indexer_training_inputs(case, SEED)
    verdicts = judge_indexer_training.check_index_backward(inputs, TRITON)
    assert wrong(verdicts) == []
    assert verdicts[1].output == "dk_index" and verdicts[1].norm_error < 1e-4


def test_decode(device: Emulator) -> None:
    assert wrong(decoded(DECODE)) == []


def test_decode_of_slots_by_position_sorted(a100: Emulator) -> None:
    assert wrong(decoded(SLOTS)) == []


@pytest.mark.usefixtures("a100")
def test_tokens_of_a_page_that_is_none_are_not_chosen() -> None:
    inputs = make_indexer_inputs(IndexerCase("", (200,), 150, num_heads=16), SEED)
    inputs.block_table[0, 1:3] = torch.tensor([-1, len(inputs.cache)])
    scores = flashdsa.indexer_logits(*inputs.operands, inputs.max_len, backend=TRITON)
    ids = inputs.output_buffer()
    flashdsa.dsa_topk_indexer(*inputs.operands, ids, ids="position", backend=TRITON)
    assert scores[0, 64:192].isneginf().all()
    assert not scores[0, :64].isinf().any()
    assert ids[0].tolist() == [*range(64), *range(192, 200), *[-1] * 78]


def test_prefill(device: Emulator) -> None:
    assert wrong(prefilled(PREFILL)) == []


def test_prefill_of_bf16_keys_that_all_queries_see_from_0(a100: Emulator) -> None:
    case = replace(PREFILL, dtype=torch.bfloat16, ranges=causal(3, 60), no_starts=True)
    assert wrong(prefilled(case)) == []


@pytest.mark.usefixtures("a100")
def test_parts_of_a_row_and_pieces_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MOST_SCORES", {False: 256, True: 256})
    monkeypatch.setattr(indexer, "SCORES_BYTES", 4 * 1000)
    case = IndexerCase("", (400, 390), 60, num_heads=16, nan_keys=True, sorted=True)
    assert wrong(decoded(case)) == []
    monkeypatch.setattr(launch, "SHORT_ROWS", (64, 128))
    # Two parts; one; short rows of both kinds; rows whose scores are not written.
    ranges = (*causal(1, 300), *causal(2, 250, 300), *causal(6, 61, 300), *causal(1, 100, 300))
    ranges += ((270, 295), (299, 300), (7, 7))
    prompts = replace(PREFILL, ranges=ranges, sorted=False, strided=False, num_heads=16)
    assert wrong(prefilled(prompts)) == []


@pytest.mark.usefixtures("a100")
def test_scores_of_any_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MOST_SCORES", {False: 256, True: 256})
    scores = torch.randint(-4, 4, (5, 300)) / 2 * torch.tensor([1.0, -1.0]).repeat(150)
    for step, value in ((3, torch.nan), (7, torch.inf), (9, -torch.inf)):
        scores[:, ::step] = value
    scores.view(torch.int32)[:, 1::8] = -1  # a NaN, as a mark of the kernels' own
    lengths = torch.tensor([300, 0, 1, 90, 257], dtype=torch.int32)
    for topk, order in ((100, False), (60, True)):
        verdicts = judge_indexer.check_topk(scores, lengths, topk, TRITON, sorted=order)
        assert wrong(verdicts) == []


def test_training(device: Emulator) -> None:
    assert wrong(trained(TRAINING)) == []


@pytest.mark.usefixtures("a100")
def test_deterministic_gradients_of_two_blocks_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer_training, "WORKSPACE_BYTES", 4 * 128 * 40)
    monkeypatch.setitem(launch.TILES["indexer's backward"], "others", launch.Shape(16, 32, 4))
    inputs = make_indexer_training_inputs(TRAINING, SEED)
    check = judge_indexer_training.check_index_backward
    assert wrong(check(inputs, TRITON, deterministic=True)) == []


@pytest.mark.usefixtures("a100")
def test_gradients_of_slots_that_cancel() -> None:
    q, k, weights = torch.randn(1, 16, 128), torch.randn(4, 128), torch.randn(1, 16)
    indices = torch.tensor([[2, 2, 3]], dtype=torch.int32)
    grad = torch.tensor([[1.0, -1.01, 0.0]])
    operands = q.bfloat16(), k.bfloat16(), weights, indices, grad
    dq, dk, _ = flashdsa.indexer_bwd(*operands, backend=TRITON)
    expected = reference.indexer_bwd(*operands)
    assert (dq - expected.dq_index).norm() <= 1e-2 * expected.dq_index.norm()
    assert (dk - expected.dk_index).norm() <= 1e-2 * expected.dk_index.norm()
    assert not dk[[0, 1, 3]].any()


@pytest.mark.usefixtures("a100")
def test_a_head_that_attends_nowhere_adds_nothing_to_the_target() -> None:
    q, kv = torch.randn(1, 8, 512).bfloat16(), torch.randn(6, 512).bfloat16()
    lse, ids = torch.full((1, 8), 3.0), torch.arange(6, dtype=torch.int32)[None]
    q[0, 2], lse[0, 2] = torch.nan, torch.inf
    found = flashdsa.attention_target(q, kv, lse, ids, backend=TRITON)
    others = [0, 1, *range(3, 8)]
    expected = reference.attention_target(q[:, others], kv, lse[:, others], ids)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-9)


@pytest.mark.usefixtures("a100")
def test_nothing_is_chosen_or_added_where_there_are_no_keys() -> None:
    q, weights, ids = (
        torch.randn(2, 16, 128).bfloat16(),
        torch.randn(2, 16),
        torch.zeros(2, 5).int(),
    )
    operands = q, q[0, :0], weights, ids
    assert flashdsa.indexer_scores(*operands, backend=TRITON).isneginf().all()
    for ordered in (False, True):
        gradients = flashdsa.indexer_bwd(
            *operands, torch.randn(2, 5), deterministic=ordered, backend=TRITON
        )
        assert not any(gradient.any() for gradient in gradients)
    ends = torch.zeros(2, dtype=torch.int32)
    flashdsa.dsa_topk_prefill(q, q[0, :0], weights, None, ends, ids, backend=TRITON)
    assert (ids == -1).all()


@pytest.mark.usefixtures("a100")
def test_the_whole_loss_is_served_where_triton_is_asked_for() -> None:
    inputs = make_indexer_training_inputs(TRAINING, SEED)
    assert wrong(judge_composed.check_kl_loss(inputs, TRITON)) == []
    assert wrong(judge_indexer_training.check_kl_backward(inputs, TRITON)) == []


@pytest.mark.parametrize("capability", COMPILED, ids=str)
def test_compiles_for(capability: tuple[int, int]) -> None:
    emulator = Compiles(small_device(capability))
    calls: list[Callable[[], object]] = [
        lambda: decoded(DECODE),
        lambda: prefilled(replace(PREFILL, dtype=torch.bfloat16, nan_keys=False)),
        lambda: trained(TRAINING),
    ]
    with running_on(emulator):
        for call in calls:
            call()
    assert emulator.names == {"score", "select", "target", "scores", "backward"}


class Compiles(Emulator):
    """Kernels are compiled, with what the device's shared memory allows, and not launched."""

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        self.names: set[str] = set()

    def launch_triton(self, kernel: Any, grid: Any, arguments: Any, **options: Any) -> None:
        from flashdsa.backends.emulated import triton_kernels

        self.names.add(
            triton_kernels.prepared(self._device, kernel, grid, arguments, **options).kernel
        )

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor of zeros, for judges that index by it."""
        return torch.zeros(shape, dtype=dtype)
