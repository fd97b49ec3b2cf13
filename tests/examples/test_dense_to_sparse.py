"""The recipe from dense to sparse in a tiny form: its parts, a run that was stopped; two ranks
learn in tests/distributed/test_ranks.py."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from examples.dense_to_sparse.__main__ import PARTS, main, summary
from examples.dense_to_sparse.train import Recipe, Trainer, train
from tests.examples.tiny import RECIPE, model, text


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def test_every_part_runs_and_transformers_reads_the_result(tmp_path: Path) -> None:
    found = {name: part(model(), text(), RECIPE, tmp_path) for name, part in PARTS.items()}
    line = summary(found, tmp_path)
    assert re.fullmatch(rf"{tmp_path}: .*sparse\.safetensors.* \d+\.\d+ nats .*serve\.json.*", line)
    steps = [len(found["train"][stage]["losses"]) for stage in ("dense", "warm_up", "sparse")]
    assert steps == [3, 2, 3]
    looked = found["look"]["stages"]["sparse"]
    (captured,), (best,) = looked["selection"]["captured"], looked["selection"]["best"]
    assert 0 < captured <= best + 1e-6 <= 1 + 1e-5
    in_transformers = found["look"]["in_transformers"]
    assert in_transformers["theirs"] == pytest.approx(in_transformers["ours"], abs=1e-3)
    assert all(found["serve"]["equal"])


def test_the_indexer_alone_learns_in_its_warm_up(tmp_path: Path) -> None:
    train(Trainer(model(), text()[0], RECIPE, "dense", tmp_path))
    train(Trainer(model(), text()[0], RECIPE, "warm_up", tmp_path))
    before, after = (load_file(tmp_path / f"{x}.safetensors") for x in ("dense", "warm_up"))
    changed = {name for name in model().state_dict() if not torch.equal(before[name], after[name])}
    assert changed and all(".indexer." in name for name in changed)


def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = train(Trainer(model(), text()[0], RECIPE, "dense", made(tmp_path / "whole")))
    saving = Recipe(**{**vars(RECIPE), "save_every": 2})
    stopped = Trainer(model(), text()[0], saving, "dense", made(tmp_path / "parts"))
    stopped.step()
    stopped.step()
    again = Trainer(model(), text()[0], saving, "dense", made(tmp_path / "parts"))
    assert again.done == 2
    assert train(again) == whole


@pytest.mark.parametrize(("count", "ranks"), [(2, 3), (4, 8), (4, 3), (0, 1)])
def test_windows_that_ranks_cannot_share(count: int, ranks: int, tmp_path: Path) -> None:
    """No step is taken, and no window left out."""
    recipe = replace(RECIPE, windows=count)
    with (
        patch("torch.distributed.is_initialized", return_value=True),
        patch("torch.distributed.get_rank", return_value=0),
        patch("torch.distributed.get_world_size", return_value=ranks),
        pytest.raises(ValueError, match=f"a multiple of {ranks}, the number of ranks; got {count}"),
    ):
        Trainer(model(), text()[0], recipe, "dense", tmp_path)


def test_the_command_refuses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before it meets other ranks, reads text or writes a file; with as many windows it would."""
    out = tmp_path / "out"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(sys, "argv", ["dense_to_sparse", "--small", "--out", str(out)])
    with pytest.raises(SystemExit):
        main()
    assert not out.exists()
    said = capsys.readouterr().err
    assert "error: --windows: expected a multiple of 3, the number of ranks; got 2" in said
