"""`flashdsa plan`: the plan's own numbers in every form, and errors for sizes without a kernel."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from click.testing import Result

from flashdsa.kernels.indexer.sm90.plan import IndexerPlan

Run = Callable[..., Result]


def test_json_holds_every_region_barrier_and_role(run: Run) -> None:
    document = json.loads(
        run("plan", "indexer", "--json", "--num-heads", "16", "--topk", "512").stdout
    )
    plan = IndexerPlan(num_heads=16, topk=512)
    assert document["choices"]["num_heads"] == 16
    assert document["smem"]["total"] == plan.smem.total
    assert [r["offset"] for r in document["smem"]["regions"]] == list(plan.smem.offsets)
    assert [b["arrivals"] for b in document["barriers"]] == [b.arrivals for b in plan.barriers]
    assert [r["threads"] for r in document["roles"]] == [r.threads for r in plan.roles]


@pytest.mark.parametrize("option", [(), ("--markdown",), ("--sorted",)], ids=str)
def test_text_and_markdown_show_all_tables_in_100_columns(run: Run, option: tuple[str]) -> None:
    output = run("plan", "indexer", "--arch", "sm_90a", *option).output
    for word in ("histogram", "232,448", "page_empty", "segment_full", "load", "rank", "544"):
        assert word in output
    if option != ("--markdown",):
        assert max(len(line) for line in output.splitlines()) <= 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-heads", "48"), "num_heads: expected 16, 32 or 64; got 48"),
        (("--topk", "100"), "topk: expected 512, 1024 or 2048; got 100"),
        (("--arch", "sm_80"), "'sm_80' is not 'sm_90a'"),
        (("--json", "--markdown"), "--markdown: not together with --json"),
    ],
)
def test_bad_input_is_one_line(run: Run, arguments: tuple[str, ...], message: str) -> None:
    result = run("plan", "indexer", *arguments)
    assert result.exit_code == 2
    assert message in result.output
