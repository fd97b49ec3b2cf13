"""Lists that end in invalid slots: the target and the scores stop there, and say so of the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

from flashdsa.backends.emulated.devices import SMALL, Device
from flashdsa.backends.emulated.runner import EmulatedProgress, emulation
from flashdsa.verify import judge_indexer_training as judge
from flashdsa.verify.compare import failures
from flashdsa.verify.draw_rows import invalid_values
from flashdsa.verify.indexer_training_cases import (
    IndexerTrainingCase,
    IndexerTrainingInputs,
    make_indexer_training_inputs,
)
from flashdsa.verify.sparse_mla_cases import SparseMlaCase

ONE_SM = Device(1, {1: 1})
CHECKS = {"target": judge.check_target, "scores": judge.check_index_scores}
KEYS = 90


def inputs_of(
    topk: int, ends: list[int], holes: list[range], lengths: list[int] | None = None
) -> IndexerTrainingInputs:
    """Lists, one a query, whose last valid slot is `ends` less one; `holes` are invalid slots."""
    case = IndexerTrainingCase(SparseMlaCase("ends", len(ends), KEYS, 8, topk), index_heads=16)
    inputs = make_indexer_training_inputs(case, 0)
    slot = torch.arange(topk)
    bad = torch.tensor(invalid_values(KEYS))[slot % 6]
    valid = slot < torch.tensor(ends)[:, None]
    for hole in holes:
        # A list's last valid slot stays.
        valid[:, hole] &= torch.isin(slot[hole], torch.tensor(ends) - 1)
    drawn = torch.randint(KEYS, valid.shape, generator=torch.Generator().manual_seed(1))
    indices = torch.where(valid, drawn, bad).int()
    given = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    attention = replace(inputs.attention, indices=indices, topk_length=given)
    return replace(inputs, attention=attention)


def run(what: str, inputs: IndexerTrainingInputs, device: Device = ONE_SM) -> int:
    """Judge every element of the results, which were poison; the warps' instructions."""
    reports: list[EmulatedProgress] = []
    with emulation(device, on_finding="collect", on_progress=reports.append) as emulator:
        assert failures(CHECKS[what](inputs, "emulate-sm90")) == []
    assert [str(finding) for finding in emulator.findings] == []
    return reports[-1].warp_instructions if reports else 0


@pytest.mark.parametrize("what", CHECKS)
def test_every_end(what: str) -> None:
    """Ends beside those of tiles and of the first look, which begins at 202; an empty list."""
    ends = [330, 0, 329, 203, 202, 201, 130, 129, 128, 65, 64, 63, 1, 330]
    run(what, inputs_of(330, ends, []))


@pytest.mark.parametrize("what", CHECKS)
def test_holes_are_no_ends(what: str) -> None:
    """Tiles without a valid slot before the last one, and an empty first look beside valid ids."""
    ends = [330, 329, 300, 202, 70]
    run(what, inputs_of(330, ends, [range(0, 64), range(66, 199), range(203, 299)]))


@pytest.mark.parametrize("what", CHECKS)
def test_lengths_beside_invalid_slots(what: str) -> None:
    """The first of both ends counts: valid ids after a length do not."""
    ends = [330, 330, 40, 140, 330, 150]
    run(what, inputs_of(330, ends, [range(100, 120)], [200, 0, 330, 70, 999, 151]))


@pytest.mark.parametrize("queries", [pytest.param(2, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("what", CHECKS)
def test_several_ctas_of_a_query_agree(what: str, queries: int) -> None:
    """Some of them have no tile before the end."""
    run(what, inputs_of(330, [70, 200, 5, 0, 330][:queries], []), SMALL)


@pytest.mark.parametrize("what", CHECKS)
def test_long_lists_that_end_early_cost_little(what: str) -> None:
    """After the first look each warp looks twice at up to 2,048 slots."""
    short, full = (run(what, inputs_of(2400, [end, 3, end], [])) for end in (60, 2400))
    assert short < full / 3
