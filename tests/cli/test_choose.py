"""`flashdsa choose`: the choice of a call as a table."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from flashdsa.cli.main import cli


@pytest.mark.parametrize(
    ("options", "kernels"),
    [
        (["--queries", "64", "--format", "v32"], "mla_decode_stream_k_packed"),
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


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (["--requests", "1", "--tokens", "40000"], "row"),
        (["--requests", "200"], "shared"),
        (["--requests", "200", "--next-n", "2"], "ranked"),
        (["--tokens", "2048"], "unscored"),
        (["--tokens", "2048", "--sorted"], "row"),
    ],
)
def test_the_indexer_says_which_launches_it_takes(options: list[str], kind: str) -> None:
    shown = CliRunner().invoke(cli, ["choose", "dsa_topk_indexer", *options])
    assert shown.exit_code == 0 and kind in shown.output
    given = ["choose", "dsa_topk_indexer", *options, "--json"]
    first, *others = json.loads(CliRunner().invoke(cli, given).stdout)
    assert first["kind"] == kind and first["taken"] and not any(x["taken"] for x in others)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--heads", "64", "--topk", "512"], "groups of 4"),
        (["--queries", "200", "--deterministic"], "slots"),
        (["--queries", "200", "--d-qk", "512", "--no-lengths"], "additions by tickets"),
        (["--heads", "136"], "heads 128:136: additions"),
    ],
)
def test_the_backward_says_its_parts(options: list[str], says: str) -> None:
    shown = CliRunner().invoke(cli, ["choose", "mla_bwd", *options])
    found = json.loads(CliRunner().invoke(cli, ["choose", "mla_bwd", *options, "--json"]).stdout)
    assert shown.exit_code == 0 and any(says in part["part"] for part in found)
    assert all(part["plans"] for part in found)
