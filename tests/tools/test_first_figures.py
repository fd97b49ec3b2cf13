"""`tools/first_figures.py`, over a checkout of one file."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tools import first_figures, result_tables
from tools.first_figures import PLANS, Plan

LOG = "2026-12-01T16:13:24,293   Downloading click-8.5.1-py3-none-any.whl (126 kB)"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "file").write_text("1")
    for words in ("init -q", "add file", "-c user.name=a -c user.email=b commit -q -m c"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    monkeypatch.setattr(first_figures, "ROOT", tmp_path)
    monkeypatch.setattr(first_figures, "RECORD", tmp_path / "record.json")
    return tmp_path


def test_sizes_and_times_are_those_of_the_command(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "of this machine")
    setup = f"test -f file && test -z $PIP_INDEX_URL && mkdir env && echo '{LOG}' >> $PIP_LOG"
    write = "head -c 1000000 /dev/urandom > env/data && ln env/data env/again"
    burn = (
        "$PYTHON -c 'import time; s = time.process_time()\nwhile time.process_time() < s + 0.2: 1'"
    )
    monkeypatch.setattr(first_figures, "PLANS", {"pip": Plan(f"{write}; {burn}", setup, "env")})
    wheel = checkout / "torch.whl"
    wheel.write_bytes(b"x" * 1000)
    monkeypatch.setattr(sys, "argv", ["first_figures", "--torch", str(wheel)])
    first_figures.main()
    figures = first_figures.read_record()["pip"]
    assert 1_000_000 <= figures.installed_bytes <= 1_100_000  # a linked file counts once
    assert figures.downloaded_bytes == 126_000 + 1000
    assert figures.cpu_seconds >= 0.2 and figures.wall_seconds >= 0.2
    assert json.loads((checkout / "record.json").read_text())["pip"]["cores"] == figures.cores


def test_a_command_that_fails_records_nothing(checkout: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        first_figures.measure(Plan("false"), None)
    assert first_figures.read_record() == {}


def test_downloads_are_summed_in_all_units() -> None:
    lines = (LOG, " Downloading a-1.whl.metadata (500 bytes)", " Downloading b-1.whl (5.5 MB)")
    assert first_figures.logged_bytes("\n".join(lines)) == 126_000 + 500 + 5_500_000


def test_pages_show_wall_times_of_an_idle_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    record = first_figures.read_record()
    assert {*record} == {*PLANS}
    one = replace(record["test"], wall_seconds=90.0, cpu_seconds=170.0, cores=2)
    for load, shown in ((None, True), (0.2, True), (1.5, False)):
        found = dict.fromkeys(PLANS, replace(one, load=load))
        monkeypatch.setattr(first_figures, "read_record", lambda found=found: found)
        assert "170 s of CPU time" in result_tables.sizes_text()
        assert ("(1:30 min on 2 idle cores)" in result_tables.sizes_text()) == shown
