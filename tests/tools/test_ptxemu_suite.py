"""tools/ptxemu_suite.py: no change of ptxemu goes by without its tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.ptxemu_suite import PINS, digest, judged_files, passed

ROOT = Path(__file__).parents[2]


def test_every_file_of_ptxemu_is_in_the_hash() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "ptxemu"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("needs git and a checkout")
    committed = {Path(line) for line in listed.stdout.splitlines() if (ROOT / line).is_file()}
    assert committed | {PINS} <= set(judged_files(ROOT)) and len(committed) > 300


def test_a_new_a_changed_and_a_renamed_file_make_another_hash(tmp_path: Path) -> None:
    record, file = tmp_path / "passed.txt", tmp_path / "ptxemu" / "a" / "b.bin"
    file.parent.mkdir(parents=True)
    (tmp_path / PINS).write_text("numpy==2.0\n")
    assert not passed(record, tmp_path)
    record.write_text(digest(tmp_path))
    assert passed(record, tmp_path)
    seen = {digest(tmp_path)}
    changes = (
        lambda: file.write_bytes(b"\0"),
        lambda: file.write_bytes(b"\1"),
        lambda: file.rename(file.with_name("c.bin")),
        lambda: (tmp_path / PINS).write_text("numpy==2.1\n"),
    )
    for number, change in enumerate(changes, 2):
        change()
        seen.add(digest(tmp_path))
        assert len(seen) == number and not passed(record, tmp_path)
