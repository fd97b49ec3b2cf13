"""A short whole run: it learns, repeats itself exactly, and leaves a picture and numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.demo.picture import map_title
from examples.demo.run import run_demo
from examples.demo.train import DemoOptions

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
TOPK = {"v32": 64, "v4": 16}
Report = list[tuple[int, int, str]]


@pytest.fixture(scope="module", params=["v32", pytest.param("v4", marks=pytest.mark.slow)])
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Report]:
    report: Report = []
    folder = tmp_path_factory.mktemp("demo") / "new"
    options = DemoOptions(
        form=request.param, steps=24, window=320, num_queries=96, topk=TOPK[request.param],
        num_heads=2, eval_every=8, eval_windows=2, picture=folder / "demo.png",
        indices=folder / "indices.pt",
    )  # fmt: skip
    return run_demo(options, lambda *event: report.append(event)), report


def test_losses_fall_and_sparse_stays_near_dense(run: tuple[dict[str, Any], Report]) -> None:
    result, _ = run
    before, after = result["held_out"][0], result["held_out"][-1]
    assert result["steps"][-1]["train_loss"] < result["steps"][0]["train_loss"] - 1.0
    assert after["sparse_loss"] < before["sparse_loss"] - 1.0
    assert abs(after["sparse_loss"] - after["dense_loss"]) < 0.1


def test_indexer_learns_to_find_the_mass(run: tuple[dict[str, Any], Report]) -> None:
    before, *_, after = run[0]["held_out"]
    form = run[0]["options"]["form"]
    least = {"v32": 0.2, "v4": 0.12}[form]
    assert after["indexer"] > before["indexer"] + least
    assert after["random"] < after["indexer"] <= after["best"] <= 1.0 + 1e-6
    (warm,) = (look for look in run[0]["held_out"] if look["step"] == 12)
    # The text is that of Python, of any version.
    assert after["indexer"] > warm["indexer"] + {"v32": 0.05, "v4": 0.02}[form]


def test_the_share_in_a_map_is_said_to_be_one_windows() -> None:
    """The bars beside it have others, of the whole held-out text."""
    said = map_title("Before training", 0.224, DemoOptions())
    assert said.endswith("the chosen keys hold 22.4% of dense attention in this window")


def test_files_and_plain_data_are_written(run: tuple[dict[str, Any], Report]) -> None:
    plain = json.loads(json.dumps(run[0]))
    assert Path(plain["options"]["picture"]).read_bytes().startswith(PNG_SIGNATURE)
    indices = torch.load(plain["options"]["indices"])
    form = plain["options"]["form"]
    assert indices.shape == (2, 96, TOPK[form]) and indices.dtype == torch.int32
    assert len(plain["steps"]) == 24
    assert [look["step"] for look in plain["held_out"]] == [0, 8, 12, 16, 24]
    forward, backward = {"sparse_mla_fwd", "dsa_topk_prefill"}, {"mla_bwd", "indexer_bwd"}
    entries = {"compress_kv", "compress_kv_bwd"} if form == "v4" else set()
    assert forward | backward | entries <= set(plain["served"])
    assert set(plain["served"].values()) == {"cpu"}


def test_progress_reaches_its_total(run: tuple[dict[str, Any], Report]) -> None:
    _, report = run
    assert [event[:2] for event in report] == [(step, 24) for step in range(25)]


@pytest.mark.parametrize("form", ["v32", pytest.param("v4", marks=pytest.mark.slow)])
def test_same_seed_same_losses_and_untouched_global_state(tiny: DemoOptions, form: str) -> None:
    tiny, state = replace(tiny, form=form, topk=TOPK[form]), torch.random.get_rng_state()
    first, again, other = (run_demo(replace(tiny, seed=seed))["steps"] for seed in (0, 0, 1))
    assert first == again != other
    assert torch.equal(state, torch.random.get_rng_state())


def test_sizes_that_cannot_be(tiny: DemoOptions) -> None:
    with pytest.raises(ValueError, match=r"window: expected less than \d+ bytes"):
        run_demo(replace(tiny, window=10**9))
    with pytest.raises(ValueError, match=r"topk: expected less than .* = 1025.* got 1025"):
        DemoOptions(topk=1025)
    with pytest.raises(ValueError, match=r"topk: expected less than the smallest context"):
        DemoOptions(num_queries=1281)
    with pytest.raises(ValueError, match=r"topk: expected less than .* // 4 = 256.* got 256"):
        DemoOptions(form="v4")
    with pytest.raises(ValueError, match=r"form: expected v32 or v4; got 'v5'"):
        DemoOptions(form="v5")
