"""`flashdsa choose`: the choice of a call as a table."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from flashdsa.cli.main import cli


@pytest.mark.parametrize(
    ("options", "kernels"),
    [
        (["--queries", "64", "--format", "v32"], "mla_decode_dealt_packed"),
        (["--queries", "64", "--format", "v4", "--no-lengths"], "mla_decode_v4"),
        (["--queries", "4096", "--no-lengths"], "mla_used_slots, mla_fwd_drawn"),
        (["--queries", "128", "--d-qk", "512", "--max-logits"], "mla_fwd_512"),
    ],
)
def test_the_choice_of_a_call_is_shown(options: list[str], kernels: str) -> None:
    """The same in both forms, one way taken."""
    shown = CliRunner().invoke(cli, ["choose", "sparse_mla", *options])
    assert shown.exit_code == 0 and kernels in shown.output
    found = json.loads(CliRunner().invoke(cli, ["choose", "sparse_mla", *options, "--json"]).stdout)
    (taken,) = (way for way in found if way["taken"])
    assert taken["kernels"].startswith(kernels)
    assert all(way["us"] is None or way["us"] >= taken["us"] for way in found)


def test_packed_rows_have_no_largest_logits() -> None:
    done = CliRunner().invoke(cli, ["choose", "sparse_mla", "--format", "v4", "--max-logits"])
    assert done.exit_code == 2 and "--max-logits" in done.output
