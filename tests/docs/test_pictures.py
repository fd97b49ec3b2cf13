"""Pictures of the documents are those that their programs draw today.

docs/assets/demo.png is not here: its run takes a minute.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from benchmarks import draw_context_parallel, draw_peers, draw_transformers
from flashdsa.cli.main import cli
from flashdsa.cli.plan_picture import draw_plan
from flashdsa.kernels.catalog import MLA_BWD

ROOT = Path(__file__).parents[2]


def peers(target: Path) -> None:
    run_main(draw_peers.main, "--out", str(target))


def context_parallel(target: Path) -> None:
    results = (ROOT / "benchmarks/results/context_parallel").glob("*.json")
    run_main(draw_context_parallel.main, *map(str, results), "--out", str(target))


def transformers(target: Path) -> None:
    (result,) = (ROOT / "benchmarks/results/integrations").glob("*-transformers-h200.json")
    run_main(draw_transformers.main, str(result), "--out", str(target))


def mla_bwd_sm100(target: Path) -> None:
    draw_plan(MLA_BWD.variants[0], target)


def lab_tiles(target: Path) -> None:
    arguments = ["lab", "majorness", "--on", "emulator", "--no-boundary", "--picture", str(target)]
    assert CliRunner().invoke(cli, arguments).exit_code == 0


def run_main(main: Callable[[], None], *arguments: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["program", *arguments])
        main()


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"), dtype=np.int16)


PROGRAMS = [peers, context_parallel, transformers, mla_bwd_sm100, lab_tiles]


@pytest.mark.parametrize("draw", PROGRAMS)
def test_a_picture_is_what_its_program_draws(draw: Callable[[Path], None], tmp_path: Path) -> None:
    """At most one pixel in 2,000 differs by more than the palette of 256 colours explains."""
    name = draw.__name__.replace("_", "-") + ".png"
    draw(tmp_path / name)
    written, drawn = pixels(ROOT / "docs/assets" / name), pixels(tmp_path / name)
    assert written.shape == drawn.shape
    differs = (np.abs(written - drawn) > 48).any(axis=2).mean()
    assert differs < 5e-4, f"{name}: {100 * differs:.2f} % of the pixels differ"
