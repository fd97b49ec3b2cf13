"""The recipe from dense to sparse in a tiny form: its parts, a run that was stopped, two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples.dense_to_sparse.__main__ import PARTS
from examples.dense_to_sparse.train import Recipe, Trainer, train
from tests.distributed.ranks import run_ranks
from tests.examples.tiny import RECIPE, learn_on_two_ranks, model, text


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


def test_two_ranks_learn_what_one_does(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    found = train(Trainer(model(), text()[0], RECIPE, "dense", tmp_path))
    torch.save(found, tmp_path / "alone.pt")
    assert run_ranks(tmp_path, 2, [learn_on_two_ranks]) == [{}, {}]
