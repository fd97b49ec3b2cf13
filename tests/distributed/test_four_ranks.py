"""Four processes: tensor parallelism in the same mesh."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import (
    checks,
    decoding,
    failures,
    sharded_parameters,
    tensor_parallel,
    two_sources,
)
from tests.distributed.ranks import run_ranks


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    found = run_ranks(
        tmp_path,
        4,
        [
            tensor_parallel.check_heads_split_over_tp,
            checks.check_attention_equals_one_process,
            checks.check_short_sequences_leave_ranks_empty,
            checks.check_options_of_the_gradients_wire,
            checks.check_ordered_sums_by_hand,
            checks.check_indexer_equals_one_process,
            two_sources.check_two_sources_equal_one_process,
            sharded_parameters.check_sharded_parameters,
            decoding.check_decode_topk_is_exact,
            decoding.check_decode_attention_merges,
            failures.check_silent_ranks_of_four,
            failures.check_a_dead_rank_of_four,  # the last one: rank 2 does not come back
        ],
    )
    dead = found[2].pop("process", "nothing")
    assert found == [{}] * 4, "\n".join(text for one in found for text in one.values())
    assert dead.startswith(f"exit code {failures.DEAD}"), dead
