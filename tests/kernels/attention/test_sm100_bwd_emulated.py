"""The Blackwell backward's compiled kernel on ptxemu: within the contract, without a finding."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

from flashdsa.backends.emulated.devices import SMALL, Device
from flashdsa.backends.emulated.runner import Emulator, emulation
from flashdsa.backends.sm100 import mla_bwd as backend
from flashdsa.backends.sm100.mla_bwd import launch_checked
from flashdsa.errors import ArgumentValueError, UnsupportedError
from flashdsa.kernels.attention.sm100.bwd.plan import BwdPlan
from flashdsa.kernels.attention.sm100.core.tile import CLUSTER
from flashdsa.kernels.catalog import KERNELS, MLA_BWD
from flashdsa.ops.attention_backward import MlaBwdOperands
from flashdsa.plan.kernel_spec import find_kernel
from flashdsa.toolchain import Disassembler
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import (
    check_backward,
    empty_queries,
    forward_results,
    judge_backward,
)
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs
from ptxemu import Policy
from tests.kernels.findings import EVERY_FEATURE, unexpected
from tests.support.compilations import ptx_of
from workbench.analysis.compile_kernel import compile_and_keep

PLAN = BwdPlan()
HEADS = 128
ONE_PAIR = Device(2, MappingProxyType({1: 2, 2: 1}))
CASES = [
    # name, S, S_kv, H, topk
    SparseMlaCase("one block", 1, 50, HEADS, 32),
    SparseMlaCase("two blocks: either CTA owns one", 1, 40, HEADS, 64, duplicates=True),
    SparseMlaCase("fewer keys than slots", 1, 20, HEADS, 64, invalid=True, poison=True),
    SparseMlaCase("one key", 1, 1, HEADS, 32, duplicates=True, cancels=True),
]
ALL_AT_ONCE = SparseMlaCase(
    "every feature", 3, 60, HEADS, 40, attn_sink="infinite", **EVERY_FEATURE
)


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """torch.empty gives NaN: an element that a kernel leaves unwritten shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def launch(
    case: SparseMlaCase, plan: BwdPlan = PLAN, policy: Policy | None = None, pairs: int = 74
) -> Emulator:
    """The case on the emulator; its gradients are judged, and nothing may be found."""
    inputs = make_sparse_mla_inputs(case, 0, "cpu")
    O, lse = forward_results(inputs)
    rows = inputs.kv.view(-1, case.d_qk)
    operands = MlaBwdOperands(inputs.q, rows, inputs.do, lse, O, inputs.indices)
    options = {"sm_scale": case.d_qk**-0.5, "deterministic": False, "dkv_dtype": torch.float32}
    result = Emulator(policy=policy, on_finding="collect")
    function = result.function(MLA_BWD, plan)
    with result.launching(), poisoned_outputs():
        dQ, dKV, *_ = backend.run(function, operands, **options, pairs=pairs)
    assert failures(judge_backward(inputs, O, lse, {"dQ": dQ, "dKV": dKV})) == []
    assert unexpected(result.findings) == []
    return result


@pytest.mark.parametrize("case", CASES[1:], ids=lambda case: case.name)
def test_gradients_are_within_the_contract_and_nothing_is_found(case: SparseMlaCase) -> None:
    launch(case)


@pytest.mark.parametrize("when", [pytest.param("eager", marks=pytest.mark.slow), "late"])
def test_it_does_not_matter_when_asynchronous_work_happens(when: str) -> None:
    """A pair takes two queries of two blocks: every ring and every barrier goes round."""
    case = SparseMlaCase("two queries", 2, 90, HEADS, 64, duplicates=True)
    result = launch(case, policy=Policy(asynchronous=when, seed=3), pairs=1)
    assert result.setups[-1].grid[0] == CLUSTER


def test_pairs_share_queries_of_any_length_out() -> None:
    """Two queries each: one pair has 2 and 3 blocks, the other two queries without a valid slot."""
    case = SparseMlaCase("ragged", 4, 120, HEADS, 96, duplicates=True, topk_length=True)
    inputs = make_sparse_mla_inputs(case, 0, "cpu")
    assert inputs.topk_length is not None
    assert (-(-inputs.topk_length.clamp(0, 96) // BwdPlan().tile.keys)).tolist() == [2, 0, 3, 0]
    with emulation(SMALL, policy=Policy(asynchronous="eager", seed=1)) as emulator:
        assert failures(check_backward(inputs, "emulate-sm100")) == []
    assert emulator.setups[-1].grid[0] == SMALL.clusters[CLUSTER] * CLUSTER


def test_the_public_operation_takes_every_feature() -> None:
    """Lengths, sinks, gaps, a width not of 32; only the last of three queries has valid slots, and
    one pair takes them all."""
    inputs = make_sparse_mla_inputs(ALL_AT_ONCE, 0, "cpu")
    assert empty_queries(inputs).tolist() == [True, True, False]
    with emulation(ONE_PAIR):
        assert failures(check_backward(inputs, "emulate-sm100")) == []


GROUPED = [
    SparseMlaCase("16 heads, every feature", 5, 60, 16, 40, duplicates=True, invalid=True,
                  empty_rows=True, topk_length=True, attn_sink="infinite", poison=True,
                  strided=True, kv_3d=True, indices_3d=True),
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in (
            SparseMlaCase("64 heads, a query alone in its group", 3, 60, 64, 40, duplicates=True),
            SparseMlaCase("32 heads", 5, 90, 32, 33, invalid=True),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", GROUPED, ids=lambda case: case.name)
def test_neighbouring_queries_share_the_rows(case: SparseMlaCase) -> None:
    """Over the union of their keys; queries without a key, whose O and dO hold NaN, among them. One
    pair takes all groups."""
    inputs = make_sparse_mla_inputs(case, 0, "cpu")
    with emulation(ONE_PAIR):
        assert failures(check_backward(inputs, "emulate-sm100")) == []


def test_groups_go_in_parts_where_their_lists_are_large(
    small_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "MOST_UNION_BYTES", 1)
    case = SparseMlaCase("16 heads", 9, 90, 16, 33, invalid=True)
    inputs = make_sparse_mla_inputs(case, 0, "cpu")
    assert failures(check_backward(inputs, "emulate-sm100")) == []


@pytest.mark.usefixtures("small_device")
def test_where_rows_of_dkv_cancel_it_is_off_by_the_rounding_of_p_and_ds_only() -> None:
    """Logits near -1e4: a column of 2.6e5 in Q, whose share of dKV all but cancels over the heads.

    The contract allows a row 1e-4 of what was summed; P and dS in bf16, rounded once each, take
    more, whatever else is exact (tests/verify/test_row_bias.py). What is allowed besides is
    derived from that rounding: twice 2^-8 of the root of the sum of squares of a row's terms.
    """
    case = SparseMlaCase("logits near -1e4", 1, 60, HEADS, 64, logit_shift=-1e4)
    inputs = make_sparse_mla_inputs(case, 0, "cpu")
    assert failures(check_backward(inputs, "emulate-sm100")) == []


def test_bf16_gradients_of_keys_and_nothing_to_do() -> None:
    inputs = make_sparse_mla_inputs(CASES[0], 0, "cpu")
    verdicts = check_backward(inputs, "emulate-sm100", dkv_dtype=torch.bfloat16)
    assert failures(verdicts) == []
    for case in (
        SparseMlaCase("no key", 2, 0, HEADS, 32),
        SparseMlaCase("no query", 0, 9, HEADS, 32),
    ):
        nothing = make_sparse_mla_inputs(case, 0, "cpu")
        assert failures(check_backward(nothing, "emulate-sm100")) == []


def test_what_the_kernel_does_not_take_is_refused() -> None:
    inputs = make_sparse_mla_inputs(SparseMlaCase("8 heads", 1, 40, 8, 32), 0, "cpu")
    with pytest.raises(UnsupportedError, match="num_heads: takes 128, 64, 32, 16; got 8"):
        check_backward(inputs, "emulate-sm100")
    inputs = make_sparse_mla_inputs(SparseMlaCase("64 heads", 1, 40, 64, 32), 0, "cpu")
    with pytest.raises(UnsupportedError, match="num_heads 64 and deterministic: not together"):
        check_backward(inputs, "emulate-sm100", deterministic=True)


def test_dq_is_written_by_whole_sectors() -> None:
    """And refused where it does not begin at one."""
    whole = [torch.empty(1, HEADS, d, dtype=torch.bfloat16) for d in (576, 512)]
    q, dO = whole
    dq = torch.empty(HEADS * 576 + 8, dtype=torch.bfloat16)[8:].view(1, HEADS, 576)
    rest = torch.empty(0)
    with pytest.raises(ArgumentValueError, match=r"dQ: .* aligned to 32 bytes"):
        launch_checked(lambda *_: None, q, q, dO, rest, dO, rest, rest, rest, dq, q, 1.0, 1)


def test_the_instructions_that_make_it_this_kernel() -> None:
    text = ptx_of(MLA_BWD, PLAN)
    products = re.findall(r"tcgen05\.mma\S*\s+\[[^]]+\], (\[?)%", text)
    from_tmem = products.count("[")
    block = 16 + 2 + 2  # dP, dQ, dQ's RoPE dims; dP is issued in two places
    assert from_tmem == block + 16
    assert len(products) == from_tmem + 2 * 18 + 4 * 8 + 8
    assert set(re.findall(r"cta_group::\d", text)) == {"cta_group::1"}
    reduce_add = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"
    assert reduce_add in text
    assert not re.search(r"\b(red|atom)\.\S*global", text)
    assert "st.async" in text and "mapa.shared::cluster" in text
    assert "tile::gather4" in text


def test_a_list_that_fills_every_ring_several_times() -> None:
    """The model's topk is a slow test, and does no more than this but for longer."""
    case = SparseMlaCase("long list", 1, 500, HEADS, 320, invalid=True)
    launch(case, policy=Policy(asynchronous="eager"))


@pytest.mark.slow
def test_the_softmax_chain_waits_for_no_memory_of_the_gpu() -> None:
    """MEMBAR.ALL.GPU, some 1,500 clocks, stands at the two cluster barriers and nowhere else: what
    the exchange releases lies in shared memory."""
    disassembler = Disassembler.find()
    if disassembler is None:
        pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    (kept,) = compile_and_keep(find_kernel(KERNELS, "mla_bwd", "sm_100a"))
    code = disassembler.text(kept.cubin, "-c")
    of_barriers = re.findall(r"MEMBAR\.ALL\.GPU(?:.*\n){1,4}?.*UCGABAR_ARV", code)
    assert (code.count("MEMBAR.ALL.GPU"), len(of_barriers)) == (2, 2)
