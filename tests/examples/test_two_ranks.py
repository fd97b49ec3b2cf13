"""FSDP2 and distributed checkpoints of the recipe: two processes learn what one learns."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.ranks import run_ranks
from tests.examples import two_ranks


def test_two_ranks_learn_what_one_learns(tmp_path: Path) -> None:
    two_ranks.learn_alone(tmp_path)
    found = run_ranks(tmp_path, 2, [two_ranks.read_on_two_ranks, two_ranks.learn_on_two_ranks])
    assert found == [{}, {}], "\n".join(text for one in found for text in one.values())
    two_ranks.check_what_they_learned(tmp_path)
