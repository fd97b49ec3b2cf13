"""Processes give what one gives, and errors on all: one set of them runs all checks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed import (
    checks,
    decoding,
    disagreements,
    failures,
    on_gpus,
    random_calls,
    sharded_parameters,
    training,
    two_sources,
)
from tests.distributed.ranks import run_ranks


def test_two_ranks(tmp_path: Path) -> None:
    found = run_ranks(
        tmp_path,
        2,
        [
            checks.check_attention_equals_one_process,
            checks.check_short_sequences_leave_ranks_empty,
            checks.check_ranks_may_have_different_numbers_of_queries,
            checks.check_options_of_the_gradients_wire,
            checks.check_ordered_sums_by_hand,
            checks.check_gathered_by_hand,
            checks.check_fp8_rows_travel,
            checks.check_checkpointing_and_collectives_seen,
            checks.check_autocast,
            checks.check_compiled,
            checks.check_compiled_ranks_that_differ,
            checks.check_dtensors,
            checks.check_parallel_style,
            checks.check_the_program_of_the_guide,
            checks.check_indexer_equals_one_process,
            decoding.check_decode_topk_is_exact,
            decoding.check_decode_attention_merges,
            decoding.check_decode_under_autocast,
            decoding.check_decode_errors,
            decoding.check_vllms_decode_context_parallelism,
            training.check_weights_learn_as_in_one_process,
            sharded_parameters.check_sharded_parameters,
            two_sources.check_two_sources_equal_one_process,
            two_sources.check_borders_move_no_more_than_they_need,
            two_sources.check_ranks_that_differ_in_two_sources,
            training.check_targets_of_two_ranks,
            disagreements.check_ranks_that_differ_behind_good_calls,
            disagreements.check_wrong_arguments_of_decode,
            disagreements.check_wrong_arguments_of_the_rest,
            disagreements.check_a_rank_without_tokens,
            disagreements.check_decode_has_no_gradient,
            disagreements.check_transforms_of_torch_func,
            disagreements.check_a_channel_of_its_own,
            disagreements.check_a_restarted_peer,
            random_calls.check_random_calls,
            random_calls.check_random_calls_on_a_channel_of_its_own,
            failures.check_ranks_that_differ,
            failures.check_an_error_of_one_rank,
            failures.check_meshes,
            failures.check_a_hung_rank,
            failures.check_a_dead_rank,  # the last one: rank 1 does not come back
        ],
    )
    dead = found[1].pop("process", "nothing")
    assert found == [{}, {}], "\n".join(text for one in found for text in one.values())
    assert dead.startswith(f"exit code {failures.DEAD}"), dead


@pytest.mark.slow
def test_inductor_on_two_ranks(tmp_path: Path) -> None:
    found = run_ranks(tmp_path, 2, [checks.check_compiled_by_inductor])
    assert found == [{}, {}], "\n".join(text for one in found for text in one.values())


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    found = run_ranks(
        tmp_path,
        4,
        [
            sharded_parameters.check_heads_split_over_tp,
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


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
def test_two_gpus(tmp_path: Path) -> None:
    found = run_ranks(
        tmp_path,
        2,
        [
            on_gpus.check_attention_on_gpus,
            on_gpus.check_two_sources_on_gpus,
            on_gpus.check_indexer_on_gpus,
            on_gpus.check_ranks_that_differ_on_gpus,
            on_gpus.check_decode_on_gpus,
            on_gpus.check_decode_in_a_graph,
        ],
        backend="cpu:gloo,cuda:nccl",
    )
    assert found == [{}, {}], "\n".join(text for one in found for text in one.values())
