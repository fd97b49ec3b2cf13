"""Context parallelism under autocast is what one process computes under it."""

from __future__ import annotations

from pathlib import Path

from tests.distributed import autocasting
from tests.distributed.ranks import run_ranks


def test_autocast_on_two_ranks(tmp_path: Path) -> None:
    found = run_ranks(tmp_path, 2, [autocasting.check_attention_is_cast_as_in_one_process])
    assert found == [{}, {}], "\n".join(text for one in found for text in one.values())
