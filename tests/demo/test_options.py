"""Wrong choices are refused with the option's name, what was expected, and what came."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashdsa.demo import DemoOptions, run_demo


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"steps": 0}, r"steps: expected an integer >= 1, got 0"),
        ({"steps": 2.5}, r"steps: expected an integer >= 1, got 2.5"),
        ({"num_heads": -1}, r"num_heads: .* got -1"),
        ({"num_queries": 1281}, r"num_queries: expected at most window = 1280, got 1281"),
        ({"topk": 1025}, r"topk: expected less than the smallest context.* = 1025.* got 1025"),
        ({"seed": -1}, r"seed: expected an integer in .* got -1"),
        ({"learning_rate": 0.0}, r"learning_rate: expected a number > 0, got 0.0"),
        ({"learning_rate": float("nan")}, r"learning_rate: .* got nan"),
        ({"picture": Path("picture.txt")}, r"picture: expected a name ending in .*picture.txt"),
    ],
)
def test_wrong_option(choice: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DemoOptions(**choice)


def test_default_selects_from_at_least_a_thousand() -> None:
    options = DemoOptions()
    assert options.smallest_context >= 1024
    assert options.topk == 256


def test_an_unwritable_picture_is_refused_before_training(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    with pytest.raises(ValueError, match=r"picture: cannot write '.*demo.png': "):
        run_demo(DemoOptions(picture=in_the_way / "demo.png"))


def test_asking_whether_a_picture_can_be_written_leaves_no_file(tmp_path: Path) -> None:
    options = DemoOptions(picture=tmp_path / "new" / "demo.png")
    options.require_writable_files()
    assert not options.picture.exists()
