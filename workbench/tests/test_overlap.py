"""Unions of neighbouring queries: numbers counted by hand, and the command around them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from flashdsa.errors import ArgumentTypeError, ArgumentValueError
from workbench.__main__ import cli
from workbench.overlap import measure_overlap

INDICES = torch.tensor([[5, 3, 1, -1], [1, 3, 7, 7], [9, 8, -1, -1], [8, 9, 4, 2]])
"""Distinct rows 3, 3, 2, 4; unions of two {1, 3, 5, 7} and {2, 4, 8, 9}."""


def test_unions_counted_by_hand() -> None:
    found = measure_overlap(INDICES, (1, 2, 4))
    assert (found.sequences, found.queries, found.topk) == (1, 4, 4)
    assert found.valid == 13 / 16
    assert found.distinct == 12 / 13
    # Of the distinct rows of queries 1 to 3: {1, 3} of 3, none of 2, {8, 9} of 4.
    assert found.shared == pytest.approx(4 / 9)
    alone, two, four = found.groups
    assert (alone.union_rows, alone.ratio, alone.left) == (3.0, 1.0, 1.0)
    assert (two.groups, two.union_rows, two.named_rows) == (2, 4.0, 6.0)
    assert two.ratio == pytest.approx(8 / 6)
    assert (two.smallest, two.largest) == pytest.approx((4 / 3, 4 / 3))
    assert (four.union_rows, four.ratio) == (8.0, pytest.approx(8 * 4 / 12))


def test_what_reused_lists_keep_counted_by_hand() -> None:
    found = measure_overlap(INDICES, (1, 2))
    # Two queries before: {1, 3, 5} has none of {8, 9}, {1, 3, 7} none of {8, 9, 4, 2}.
    assert found.kept == {1: pytest.approx(4 / 9), 2: 0.0}


def test_groups_do_not_reach_into_the_next_sequence() -> None:
    apart = torch.stack([torch.zeros(3, 2), torch.ones(3, 2)]).int()
    (two,) = measure_overlap(apart, (2,)).groups
    assert (two.groups, two.ratio) == (2, 1.0)


def test_shape_of_flash_mla() -> None:
    (two,) = measure_overlap(INDICES[:, None], (2,)).groups
    assert two.union_rows == 4.0


@pytest.mark.parametrize(
    ("indices", "groups", "error", "says"),
    [
        (torch.ones(4, 4), (2,), ArgumentTypeError, "expected integers, got torch.float32"),
        (torch.ones(4).int(), (2,), ArgumentValueError, r"expected \[S, topk\]"),
        (INDICES, (8,), ArgumentValueError, "sizes from 1 to 4"),
        (-torch.ones(4, 4).int(), (2,), ArgumentValueError, "no slot names a row"),
    ],
)
def test_errors_name_what_was_expected(
    indices: torch.Tensor, groups: tuple[int, ...], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        measure_overlap(indices, groups)


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["overlap", *arguments])


def test_the_command_prints_what_the_function_finds(tmp_path: Path) -> None:
    torch.save({"layer3": INDICES}, tmp_path / "x.pt")
    result = _run(str(tmp_path / "x.pt"), "--key", "layer3", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [group["queries"] for group in document["groups"]] == [1, 2, 4]
    assert document["groups"][1]["union_rows"] == 4.0
    np.save(tmp_path / "x.npy", INDICES.numpy())
    text = _run(str(tmp_path / "x.npy"), "--groups", "2").stdout
    assert "1.333" in text
    assert all(len(line) <= 80 for line in text.splitlines() if str(tmp_path) not in line)


def test_what_is_no_index_tensor_is_one_line(tmp_path: Path) -> None:
    torch.save({"layer3": INDICES}, tmp_path / "x.pt")
    (tmp_path / "text.pt").write_text("no tensor")
    for arguments, says in (
        (["missing.pt"], "No such file"),
        ([str(tmp_path / "text.pt")], "not a tensor saved by torch.save"),
        ([str(tmp_path / "x.pt")], "holds layer3; choose one by --key"),
        (["indices.csv"], "expected a name ending in .pt or .npy"),
    ):
        result = _run(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        (line,) = result.stderr.splitlines()
        assert says in line
