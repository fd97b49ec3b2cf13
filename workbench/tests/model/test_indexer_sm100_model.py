"""The model of the Blackwell indexer holds the floors and has the CTAs of a launch."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from flashdsa.backends.emulated.devices import B200 as DEVICE
from flashdsa.backends.indexer.clusters import choose_clusters
from flashdsa.kernels.indexer.sm100.plan import IndexerPlan
from workbench.__main__ import cli
from workbench.model.indexer_sm90 import TOKEN_BYTES
from workbench.model.indexer_sm100 import b200_shapes, predict_all, product_clocks
from workbench.model.machine import B200


def test_rows_have_the_ctas_that_a_launch_gives_them() -> None:
    for shape in b200_shapes():
        clusters = choose_clusters(DEVICE.clusters, shape.rows)
        per_row = clusters.num_splits if shape.tokens >= IndexerPlan().split_pages * 64 else 1
        assert (shape.ctas, shape.num_splits) in {
            (clusters.size * per_row, per_row),
            (1, 1),  # more rows than clusters: halved until a row has one CTA
        }


def test_no_shape_is_faster_than_memory_and_launch() -> None:
    for found in predict_all(B200).values():
        assert {one.pages_per_stage for one in found} == {1, 2, 4}
        for one in found:
            floor = one.shape.rows * one.shape.tokens * TOKEN_BYTES / B200.hbm.value
            assert floor + B200.launch.value < one.low < one.high


@pytest.mark.parametrize(("pages", "clocks"), [(1, 128), (2, 192), (4, 384)])
def test_products_are_bound_by_shared_memory_or_half_the_rate(pages: int, clocks: int) -> None:
    assert product_clocks(IndexerPlan(pages_per_stage=pages), B200) == clocks


def test_the_command_shows_ranges_and_what_is_carried_over() -> None:
    done = CliRunner().invoke(cli, ["model", "indexer", "--arch", "sm_100a", "--markdown"])
    assert done.exit_code == 0
    assert "| 128/64K |" in done.output and "measured on an H200" in done.output
