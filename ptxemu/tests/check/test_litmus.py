"""The litmus table: the verdict is that of the table on every schedule, and the docs show it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.check.checked_run import POLICIES, check
from tests.check.litmus import TABLE, Litmus, program

DOCS = Path(__file__).parents[2] / "docs/concepts/how-it-works.md"


@pytest.mark.parametrize("test", TABLE, ids=lambda test: test.name)
def test_the_verdict_is_the_same_on_every_schedule(test: Litmus) -> None:
    threads = len(test.threads)
    verdicts = {
        frozenset(
            f.code
            for f in check(
                program(test),
                grid=1 if test.warps else threads,
                block=32 * threads if test.warps else test.block,
                policy=policy,
                how={"shared": 1024},
                x=256,
                y=32,
                f=2,
                g=1,
            )
            if f.level != "note" or f.code in ("stale-read", "unordered-float-additions")
        )
        for policy in POLICIES
    }
    assert verdicts == {test.codes}


def row(test: Litmus) -> str:
    """The test's row in the docs."""
    found = ", ".join(f"`{code}`" for code in sorted(test.codes)) or "silent"
    return f"| {test.name} | {test.model} | {found} |"


def test_the_docs_show_the_table() -> None:
    text = DOCS.read_text()
    assert [row(test) for test in TABLE if row(test) not in text] == []
