"""The recipe from dense to sparse in a tiny form: its parts, a run that was stopped; two ranks
learn in test_two_ranks.py."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from examples.dense_to_sparse import looks
from examples.dense_to_sparse.__main__ import PARTS, main, summary
from examples.dense_to_sparse.checkpoint import build, config_of
from examples.dense_to_sparse.train import STAGES, Trainer, train
from tests.examples.published import write
from tests.examples.tiny import RECIPE, SAVING, SIZES, model, start, text

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_part_runs_and_transformers_reads_the_result(tmp_path: Path) -> None:
    found = {name: part(model(), text(), RECIPE, tmp_path) for name, part in PARTS.items()}
    line = summary(found, tmp_path)
    said = r".*sparse, .* nats .* recall .*90%.*; sparse \d+\.\d+, \d+%; .*serve\.json.*"
    assert re.fullmatch(f"{tmp_path}: {said}", line)
    steps = [len(found["train"][stage]["losses"]) for stage in ("dense", "warm_up", "sparse")]
    assert steps == [3, 2, 3]
    looked = found["look"]["stages"]["sparse"]
    (captured,), (best,) = looked["selection"]["captured"], looked["selection"]["best"]
    assert 0 < captured <= best + 1e-6 <= 1 + 1e-5
    in_transformers = found["look"]["in_transformers"]
    assert in_transformers["theirs"] == pytest.approx(in_transformers["ours"], abs=1e-3)
    assert all(found["serve"]["equal"])
    config = json.loads((tmp_path / "sparse" / "config.json").read_text())
    assert (config["topk_method"], config["scoring_func"]) == ("noaux_tc", "sigmoid")
    assert config["architectures"] == ["DeepseekV32ForCausalLM"]


def test_the_indexer_alone_learns_in_its_warm_up(tmp_path: Path) -> None:
    train(Trainer(model(), text()[0], RECIPE, "dense", tmp_path))
    train(Trainer(model(), text()[0], RECIPE, "warm_up", tmp_path))
    before, after = (load_file(tmp_path / x / "model.safetensors") for x in ("dense", "warm_up"))
    changed = {name for name in model().state_dict() if not torch.equal(before[name], after[name])}
    assert changed and all(".indexer." in name for name in changed)


def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = train(start(tmp_path / "whole"))
    stopped = start(tmp_path / "parts", SAVING)
    stopped.step()
    stopped.step()
    again = start(tmp_path / "parts", SAVING)
    assert again.done == 2
    assert train(again) == whole


def test_a_taught_indexer_passes_the_look_at_its_recall(tmp_path: Path) -> None:
    """And one that nobody taught fails, and so do the newest keys."""
    bytes_of = [path.read_bytes() for path in sorted((ROOT / "docs").rglob("*.md"))]
    read = torch.frombuffer(bytearray(b"".join(bytes_of)), dtype=torch.uint8)
    sizes = replace(SIZES, hidden=64, q_rank=64, intermediate=128)
    recipe = replace(
        RECIPE, steps=(60, 40, 0, 0), context=128, rates=(3e-3, 3e-3, 0, 0), rising_steps=5
    )
    one, recall = build(sizes.config(recipe.context), torch.device("cpu")), []
    for stage in ("dense", "warm_up"):
        train(Trainer(one, read, recipe, stage, tmp_path))
        looked = looks.selection(one, read, recipe.context, 32)
        recall += looked["recall"]
        assert max(looked["newest"]) < looks.RECALL * min(looked["best"])
    untaught, taught = recall
    assert untaught < 0.7 * looks.RECALL
    assert taught >= looks.RECALL


@pytest.mark.slow
def test_the_command_starts_from_weights_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a tokenizer's ids, rates and a length of its own; their files stay as they are."""
    write(tmp_path / "v32")
    before = contents(tmp_path / "v32")
    np.save(tmp_path / "ids.npy", np.arange(20_000, dtype=np.int32) % 251)
    named = ("--start", "v32"), ("--tokens", "ids.npy"), ("--out", "out")
    options = [word for name, path in named for word in (name, str(tmp_path / path))]
    options += ["--small", "--steps", *"9110", "--context", "64", "--rising-steps", "1"]
    options += ["--rates", "0", "1e-2", "1e-3", "1e-3"]
    for only in (["--only", "look"], []):  # before anything is learned, and all
        monkeypatch.setattr(sys, "argv", ["dense_to_sparse", *options, *only])
        main()
        assert re.search(r"dense \d+\.\d+, \d+%[;\n]", capsys.readouterr().out)
    assert contents(tmp_path / "v32") == before
    found = json.loads((tmp_path / "out" / "train.json").read_text())
    assert [len(found[stage]["losses"]) for stage in STAGES] == [0, 1, 1, 0]
    theirs, ours = (config_of(tmp_path / one) for one in ("v32", "out/sparse"))
    assert theirs.to_dict() == ours.to_dict() | {"dtype": theirs.dtype}
    for part in ("look", "serve"):
        assert (tmp_path / "out" / f"{part}.json").exists()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ("nothing", "--start: expected a folder with config.json; got .*nothing"),
        ("v32", "--out: .*dense is another checkpoint than --start"),
    ],
)
def test_the_command_refuses_a_start(
    start: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    write(tmp_path / "v32")
    (tmp_path / "out" / "dense").mkdir(parents=True)
    options = "--start", str(tmp_path / start), "--out", str(tmp_path / "out")
    monkeypatch.setattr(sys, "argv", ["dense_to_sparse", "--small", *options])
    with pytest.raises(SystemExit):
        main()
    assert re.search(said, capsys.readouterr().err)


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
        start(tmp_path, recipe)


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
