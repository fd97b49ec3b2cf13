"""The Hopper backward's compiled kernels together on ptxemu: within the contract, no finding."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

from flashdsa.backends.emulated.devices import SMALL
from flashdsa.backends.emulated.runner import Emulator, emulation
from flashdsa.backends.sm90 import mla_bwd, mla_bwd_choice, mla_bwd_grouped
from flashdsa.backends.sm90.mla_bwd_per_item import LaunchPerItem, bind_per_item
from flashdsa.errors import UnsupportedError
from flashdsa.heuristics.h200 import Backward
from flashdsa.kernels.attention.choice import FIRST, SECOND
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.plan import DkvPlan
from flashdsa.kernels.attention.sm90.bwd_grouped.dq.plan import DqPlan
from flashdsa.kernels.attention.sm90.core.tile import WITHOUT_ROPE
from flashdsa.kernels.catalog import MLA_BWD_DKV, MLA_BWD_DQ
from flashdsa.plan.kernel_spec import KernelSpec
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import check_autograd, check_backward
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs
from tests.kernels.findings import EVERY_FEATURE
from tests.support.compilations import ptx_of


def check(case: SparseMlaCase, **options: object) -> Emulator:
    """The public operation on a small device; its gradients are judged, and nothing is found."""
    inputs = make_sparse_mla_inputs(case, 0, "cpu")
    with emulation(SMALL) as emulator:
        assert failures(check_backward(inputs, "emulate-sm90", **options)) == []
    return emulator


def test_every_feature() -> None:
    check(SparseMlaCase("every feature", 5, 60, 64, 40, attn_sink="infinite", **EVERY_FEATURE))


def test_bf16_gradients_of_keys_and_nothing_to_do() -> None:
    """Of heads in the number that kernels are made for, some of which are not there."""
    features = {"invalid": True, "poison": True, "empty_rows": True, "attn_sink": "infinite"}
    case = SparseMlaCase("bf16", 5, 60, 40, 40, topk_length=True, **features)
    check(case, dkv_dtype=torch.bfloat16)
    check(SparseMlaCase("no key", 2, 0, 64, 32))
    check(SparseMlaCase("no query", 0, 9, 64, 32))


@pytest.mark.slow
def test_queries_that_have_no_room_are_launched_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_bwd_grouped, "MOST_WORKSPACE_BYTES", 1)
    monkeypatch.setattr(Backward, "LEAST_ROUNDS", 1)
    monkeypatch.setattr(mla_bwd_choice, "MOST_LIST_BYTES", 2 * 2 * 5 * 192)
    case = SparseMlaCase("parts", 9, 60, 64, 40, invalid=True, attn_sink="finite", poison=True)
    setups = check(case).setups
    # Two parts, of two groups and of one. Of each the lists of single queries or their delta, the
    # sample, the lists of groups, the choice, the copy of kv and the fused kernel; of each group
    # scores, dQ, what mends it, dKV; and once the sinks' gradient.
    assert len(setups) == 2 * 6 + 3 * 4 + 1
    assert sum("sink_kernel" in setup.kernel for setup in setups) == 1


@pytest.mark.parametrize(
    ("named", "sampled", "taken"),
    [
        ("the same", FIRST, FIRST),
        pytest.param("one other", FIRST, SECOND, marks=pytest.mark.slow),
        ("others", SECOND, SECOND),
    ],
)
def test_kernels_with_a_spool_run_where_queries_have_much_in_common(
    named: str, sampled: int, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one other row in a whole tile, two queries have two tiles. The first group's list has a
    tile and a tail, the second's six keys of one query, beside which another has none. The kernel
    of single queries is that of lists with lengths, which other tests compile, too."""
    seen = []

    def spied(*given: Any) -> LaunchPerItem:
        launch = bind_per_item(*given)

        def launch_and_keep(inputs: Any, outputs: Any, large: tuple[Any, ...] = ()) -> None:
            *_, choice, _, _, of_sample, _, _ = large
            seen.append((choice, of_sample[:1]))
            launch(inputs, outputs, large)

        return launch_and_keep

    monkeypatch.setattr(mla_bwd, "bind_per_item", spied)
    monkeypatch.setattr(Backward, "LEAST_ROUNDS", 1)
    invalid = named == "others"
    topk = {"others": 40, "one other": 64}.get(named, 70)
    features = {"topk_length": True, **dict.fromkeys(("poison", "invalid", "empty_rows"), invalid)}
    inputs = make_sparse_mla_inputs(SparseMlaCase(named, 4, 79, 128, topk, **features), 0, "cpu")
    assert inputs.topk_length is not None
    if not invalid:
        inputs.indices[:], inputs.topk_length[:] = torch.arange(topk), topk
    if named == "the same":
        inputs.topk_length[2:], inputs.do[3] = torch.tensor([6, 0]), torch.nan
    if named == "one other":
        inputs.indices[::2, 9] = 70
    with emulation(SMALL):
        assert failures(check_backward(inputs, "emulate-sm90")) == []
    ((choice, of_sample),) = seen
    assert (of_sample.tolist(), choice.tolist()) == ([sampled], [taken])


@pytest.mark.slow
def test_autograd_is_the_forward_and_the_backward() -> None:
    case = SparseMlaCase("autograd", 3, 90, 16, 40, invalid=True, attn_sink="finite")
    with emulation(SMALL):
        inputs = make_sparse_mla_inputs(case, 0, "cpu")
        assert failures(check_autograd(inputs, "emulate-sm90")) == []


@pytest.mark.slow
@pytest.mark.parametrize("heads", [3, 136])
def test_any_number_of_heads(heads: int) -> None:
    """The next number that kernels are made for; of more than 128 some after the others: 128, 8."""
    features = {"invalid": True, "poison": True, "empty_rows": True, "attn_sink": "infinite"}
    check(SparseMlaCase("padded", 5, 60, heads, 40, topk_length=True, **features))


JOINED = {
    "a window and ids": SparseMlaCase(
        "a window and ids", 4, 60, 64, 20, extra_keys=150, extra_topk=40, ranges="extra_kv",
        invalid=True, topk_length=True, poison=True, strided=True, d_qk=512, attn_sink="finite",
    ),
    "pools of 4 and a tail": SparseMlaCase(
        "pools of 4 and a tail", 4, 61, 64, 8, index_block=4, extra_keys=61, extra_topk=3,
        ranges="extra_kv", duplicates=True, empty_rows=True, poison=True, d_qk=512,
    ),
    "two ranges": SparseMlaCase(
        "two ranges", 5, 90, 16, 30, extra_keys=70, extra_topk=5, ranges="kv and extra_kv",
        empty_rows=True, poison=True,
    ),
    "no row, and 9": SparseMlaCase(
        "no row, and 9", 3, 0, 40, 20, extra_keys=9, extra_topk=4, duplicates=True, d_qk=512
    ),
}  # fmt: skip
"""Two sources, ranges and blocks, which are joined before all else."""


@pytest.mark.parametrize("name", ["a window and ids", "pools of 4 and a tail"])
def test_gradients_of_two_sources(name: str) -> None:
    """By the kernel of eight queries, which takes least time to compile."""
    check(replace(JOINED[name], num_heads=8))


@pytest.mark.slow
@pytest.mark.parametrize("in_order", [False, True])
def test_joint_lists_that_have_no_room_are_made_in_parts(
    in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mla_bwd_choice, "MOST_JOINT_BYTES", 3 * 13 * 170)
    emulator = check(JOINED["a window and ids"], deterministic=in_order)
    assert sum("join_kernel" in setup.kernel for setup in emulator.setups) == 2


@pytest.mark.slow
def test_autograd_of_two_sources() -> None:
    inputs = make_sparse_mla_inputs(JOINED["a window and ids"], 0, "cpu")
    with emulation(SMALL):
        assert failures(check_autograd(inputs, "emulate-sm90")) == []


def test_what_the_kernels_do_not_take_is_refused() -> None:
    inputs = make_sparse_mla_inputs(SparseMlaCase("d_qk", 1, 40, 16, 32, d_qk=640), 0, "cpu")
    with pytest.raises(UnsupportedError, match="d_qk: takes 512, 576; got 640"):
        check_backward(inputs, "emulate-sm90")


@pytest.mark.parametrize(
    ("spec", "plan", "shapes"),
    [
        (MLA_BWD_DQ, DqPlan(), {"m64n192": 8}),
        pytest.param(
            *(MLA_BWD_DQ, DqPlan(WITHOUT_ROPE), {"m64n192": 8, "m64n128": 8}),
            marks=pytest.mark.slow,
        ),
        # Twice, of a slice with 192 latent dims and of the one with 128; four steps a matrix.
        (MLA_BWD_DKV, DkvPlan(), {"m64n192": 48, "m64n128": 16}),
        pytest.param(
            *(MLA_BWD_DKV, DkvPlan(WITHOUT_ROPE), {"m64n192": 32, "m64n128": 32}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_products_of_dq_and_dkv_are_those_of_the_design(
    spec: KernelSpec, plan: Any, shapes: dict[str, int]
) -> None:
    found = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m64n\d+)k16", ptx_of(spec, plan))
    assert {shape: found.count(shape) for shape in found} == shapes
