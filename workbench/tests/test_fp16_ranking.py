"""Ranking by fp16 scores: what `python -m workbench ranking` counts."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from workbench.__main__ import cli
from workbench.fp16_ranking import KINDS, compare, savings, scores_of


@pytest.mark.parametrize("scale", [1.0, 2.0**-40, 2.0**40])
def test_scores_that_fp16_tells_apart_keep_their_sets(scale: float) -> None:
    """Whatever their size: rows are scaled, so that none overflows or vanishes."""
    scores = torch.randperm(2000, generator=torch.Generator().manual_seed(0)).float()
    change = compare(scores.repeat(2, 1) * scale, 100)
    assert (change.sets, change.most, change.tied, change.loss) == (0.0, 0, 1.0, 0.0)


def test_a_pair_at_the_cut_that_fp16_does_not_tell_apart_is_swapped() -> None:
    """Both become 2,048, and the smaller position wins."""
    scores = torch.tensor([[5.0, 2048.0, 2048.5, 4000.0], [1.0, 2.0, 3.0, 4.0]])
    change = compare(scores, 2)
    assert (change.sets, change.ids, change.most, change.tied) == (0.5, 0.5, 1, 1.5)
    assert change.loss == pytest.approx(0.5 / 6048.5)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_scores_are_finite_and_differ(kind: str) -> None:
    scores = scores_of(kind, 2, 320)
    assert scores.shape == (2, 320) and scores.isfinite().all()
    assert scores.unique().numel() > 400


def test_the_command_gives_numbers_of_every_kind_and_shape() -> None:
    given = ["ranking", "--rows", "1", "--tokens", "256", "--topk", "64", "--json"]
    found = json.loads(CliRunner().invoke(cli, given).stdout)
    assert [one["kind"] for one in found["changes"]] == list(KINDS)
    assert all(0 <= one["saved"] < 0.5 for one in found["savings"])
    assert len(found["savings"]) == len(savings())
