"""Models of transformers on two processes, which learn what one learns: the recipe by FSDP2 and
distributed checkpoints, and torchtitan's way."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.ranks import run_ranks
from tests.examples import two_ranks
from tests.integrations.test_torchtitan import small_in_shards


@pytest.mark.slow
def test_two_ranks_learn_what_one_learns(tmp_path: Path) -> None:
    two_ranks.learn_alone(tmp_path)
    checks = [two_ranks.read_on_two_ranks, two_ranks.learn_on_two_ranks, small_in_shards]
    found = run_ranks(tmp_path, 2, checks)
    assert found == [{}, {}], "\n".join(text for one in found for text in one.values())
    two_ranks.check_what_they_learned(tmp_path)
