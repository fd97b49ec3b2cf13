"""`--seeds N`: one report on several schedules, which says which of them shows what."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.kernel_run import source

from ptxemu.check import Finding
from ptxemu.check.findings import Site
from ptxemu.cli.main import main
from ptxemu.cli.merging import Tried, merged
from ptxemu.cli.outcome import Outcome, Results
from ptxemu.cli.schedules import ASYNCHRONOUS

LOOK = """
mov.u32 %r0, %ctaid.x; setp.ne.u32 %p0, %r0, 0; @%p0 bra READER; st.global.b32 [%rd_a], 7;
st.relaxed.gpu.global.b32 [%rd_a+64], 1; bra END;
READER: ld.relaxed.gpu.global.b32 %r1, [%rd_a+64]; setp.ne.u32 %p1, %r1, 1; @%p1 bra END;
ld.global.b32 %r2, [%rd_a]; st.global.b32 [%rd_a+128], %r2;
END:
"""
"""The second CTA reads the data only where its one look at the flag comes late enough."""
ENDLESS = """
mov.u32 %r0, %ctaid.x; st.global.b32 [%rd_a], %r0;
AGAIN: ld.volatile.global.b32 %r1, [%rd_a+64]; add.u32 %r2, %r2, %r1; add.u32 %r2, %r2, 1;
bra AGAIN;
"""
SEEDS = 6


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    return written(tmp_path, LOOK)


def written(folder: Path, body: str) -> Path:
    path = folder / "kernel.ptx"
    path.write_text(source(body, ["a"]))
    return path


def arguments(path: Path, *more: str) -> list[str]:
    launch = ["--grid=2", "--block=1", "--arg=u32[64]=zeros", "--quiet"]
    return ["check", str(path), *launch, *more]


def report(capfd: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    main([*words, "--json"])
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def test_a_finding_says_which_seeds_show_it(
    kernel: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = report(capfd, *arguments(kernel, f"--seeds={SEEDS}"))
    assert found["seeds"] == list(range(SEEDS))
    (race,) = (one for one in found["findings"] if one["code"] == "race")
    assert 0 < len(race["seeds"]) < SEEDS
    for seed in range(SEEDS):
        options = (f"--seed={seed}", f"--async={ASYNCHRONOUS[seed % len(ASYNCHRONOUS)]}")
        alone = report(capfd, *arguments(kernel, *options))
        codes = {one["code"] for one in alone["findings"]}
        assert ("race" in codes) == (seed in race["seeds"])
    repeated = report(capfd, *arguments(kernel, *race["repeat"].split()))
    (same,) = (one for one in repeated["findings"] if one["code"] == "race")
    assert [same[n]["pc"] for n in ("first", "second")] == [
        race[n]["pc"] for n in ("first", "second")
    ]
    assert "seeds" not in same


def test_text_says_how_to_repeat_it(kernel: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(kernel, f"--seeds={SEEDS}")) == 1
    out = capfd.readouterr().out
    assert f"{SEEDS} schedules: seeds 0 to {SEEDS - 1}; of the first:" in out
    assert re.search(r"error: race: .* \[seeds? [\d, ]+; repeat with --seed \d", out)


def test_the_report_does_not_depend_on_how_many_run_at_once(
    kernel: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = []
    for cores in (1, 3):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
        reports.append(report(capfd, *arguments(kernel, "--seeds=4", "--seed=2")))
    one, other = (re.sub("0x[0-9a-f]+", "", json.dumps(found)) for found in reports)
    assert one == other
    assert reports[0]["seeds"] == [2, 3, 4, 5]


def test_a_time_limit_ends_all_with_what_they_found(tmp_path: Path) -> None:
    path = written(tmp_path, ENDLESS)
    command = arguments(path, "--seeds=2", "--time-limit=4", "--json")
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "ptxemu", *command], capture_output=True, text=True, check=False
    )
    assert 3 < time.monotonic() - began < 12
    assert done.returncode == 124, done.stderr
    found = json.loads(done.stdout)
    assert found["failure"] == found["stopped"] == "stopped, as --time-limit 4 says"
    races = [one for one in found["findings"] if one["code"] == "race"]
    assert races and races[0]["seeds"]


def test_what_cannot_run_is_said_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "missing.ptx")
    assert main(["check", missing, "--seeds=2"]) == 2
    assert capfd.readouterr().err.count("error") == 1


@pytest.mark.parametrize("count", ["0", "-1", "many"])
def test_a_count_is_positive(kernel: Path, count: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments(kernel, "--seeds", count))
    assert "positive" in capfd.readouterr().err or count == "-1"


def test_launches_are_saved_under_one_schedule_only(
    kernel: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(kernel, "--seeds=2", "--save", str(tmp_path / "out"))) == 2
    assert "--seeds" in capfd.readouterr().err


SCRIPT = """
import sys
print("hello", len(sys.argv))
sys.exit(3)
"""


def test_host_code_runs_once_a_seed_and_its_first_output_is_seen(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert main(["exec", "--seeds=2", "--quiet", str(script), "word"]) == 3
    out, err = capfd.readouterr()
    assert out.startswith("hello 2\n")
    assert out.count("hello") == 1
    assert "end of the output with seed 1:\n  hello 2\n" in err


def _site(pc: int) -> Site:
    return Site("k", "generic write", "cta (0,0,0) warp 0", (0, 0, 0), 0, "st", pc, None, None, pc)


def _finding(code: str, level: str, *pcs: int, message: str = "text") -> Finding:
    first, second = (*(_site(pc) for pc in pcs), None, None)[:2]
    return Finding(level, code, message, first, second, 1)


def _merged(*runs: Sequence[Finding], failures: Sequence[str] = ()) -> Results:
    tried = [
        Tried(seed, "random", Outcome("k", "", 0, Results(findings=[*findings])))
        for seed, findings in enumerate(runs)
    ]
    for one, failure in zip(tried, failures, strict=False):
        assert one.outcome is not None
        one.outcome.ran.failures.append(failure)
    return Results.of(merged(tried).ran)


def test_the_two_orders_of_one_race_are_one_finding() -> None:
    found = _merged([_finding("race", "error", 1, 2)], [_finding("lost-update", "error", 2, 1)])
    assert [(f.code, f.seeds, f.repeat) for f in found.findings] == [("race", (0, 1), "--seed 0")]


def test_the_gravest_of_one_place_is_kept() -> None:
    found = _merged(
        [_finding("same-value-race", "note", 1, 2)], [], [_finding("race", "error", 1, 2)]
    )
    assert [(f.level, f.seeds, f.repeat) for f in found.findings] == [("error", (0, 2), "--seed 2")]


def test_the_same_instructions_in_two_launches_are_two_findings() -> None:
    twice = [_finding("race", "error", 1, 2)] * 2
    assert len(_merged(twice, twice[:1]).findings) == 2


def test_other_codes_are_other_findings() -> None:
    found = _merged([_finding("stale-read", "note", 1, 2)], [_finding("stale-read", "note", 2, 1)])
    assert [f.seeds for f in found.findings] == [(0,), (1,)]


def test_failures_are_the_same_if_their_first_lines_are() -> None:
    failures = ["kernel k: deadlock\n  warp 0", "kernel k: deadlock\n  warp 1"]
    assert _merged([], [], failures=failures).failures == [
        "kernel k: deadlock [seeds 0, 1; repeat with --seed 0]\n  warp 0"
    ]
