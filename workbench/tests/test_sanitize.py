"""workbench/sanitizers/run.py: which sanitizer, what its output means, and that the mutants still exist."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from workbench.sanitizers import run

RACES = "========= RACECHECK SUMMARY: 4 hazards displayed (3 errors, 1 warning)\n"
NO_RACES = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
NO_ERRORS = "========= ERROR SUMMARY: 0 errors\n"
DONE = "sanitized case: done"
NOT_STARTED = "========= Error: Target application terminated before first instrumented API call\n"


@pytest.fixture(scope="module")
def sanitize() -> ModuleType:
    """The program."""
    return run


def test_the_newest_that_tells_its_version_is_taken(sanitize: ModuleType) -> None:
    said = {
        "/usr/bin/a": "Copyright\nVersion 2025.3.1.0 (build 36498837) (public-release)\n",
        "/pip/b": "NVIDIA (R) Compute Sanitizer\nVersion 2026.4.0.0 (build 39022338)\n",
        "/broken/c": "",
        "/usr/bin/d": "Version 2026.10\n",
    }

    def ask(path: str) -> tuple[int, ...]:
        return sanitize.version_in(said[path])

    assert sanitize.newest(list(said)[:3], ask).name == "2026.4.0.0"
    assert sanitize.newest(said, ask).path == "/usr/bin/d"
    assert sanitize.newest(["/broken/c"], ask) is None


@pytest.mark.parametrize(
    ("output", "counts"),
    [
        (RACES, (3, 1)),
        (NO_RACES, (0, 0)),
        (NO_ERRORS, (0, 0)),
        ("========= ERROR SUMMARY: 1 error\n", (1, 0)),
        (NO_ERRORS + RACES, (3, 1)),
        ("some line\n", None),
    ],
)
def test_summaries_are_read(
    sanitize: ModuleType, output: str, counts: tuple[int, int] | None
) -> None:
    assert sys.modules["workbench.sanitizers.results"].counts_in(output) == counts


def judged(sanitize: ModuleType, output: str, exit_code: int | None = 0) -> tuple[str, bool, bool]:
    """(cell, whether a case is clean, whether a mutant's control is right)."""
    case = sanitize.judge("candidates", "racecheck", output, exit_code, 8.4, 60)
    return case.cell, case.clean, sanitize.control_is_right(case)


def test_silence_is_no_success(sanitize: ModuleType) -> None:
    done = DONE + "\n"
    assert judged(sanitize, done + NO_RACES) == ("0 (8 s)", True, False)
    assert judged(sanitize, done + RACES) == ("3 + 1 warnings (8 s)", False, True)
    assert judged(sanitize, NO_RACES) == ("failed", False, False)
    assert judged(sanitize, "ids: not the CPU backend's\n" + NO_RACES, 1)[0] == "failed"
    assert judged(sanitize, done) == ("did not start", False, False)
    assert judged(sanitize, "No module named x\n" + NOT_STARTED, 1)[:2] == ("did not start", False)
    assert judged(sanitize, "", None) == ("did not end in 60 s", False, False)


def test_the_right_kernel_must_be_clean(sanitize: ModuleType) -> None:
    for output, right in ((NO_RACES, True), (RACES, False)):
        text = DONE + output
        result = sanitize.judge("right", "racecheck", text, 0, 1.0, 60)
        assert sanitize.control_is_right(result) == right


def test_what_racecheck_cannot_see_must_end(sanitize: ModuleType) -> None:
    unseen = [name for name, control in sanitize.CONTROLS.items() if control.unseen]
    assert len(unseen) < len(sanitize.CONTROLS) / 2
    for output, exit_code, right in ((DONE + NO_RACES, 0, True), ("", None, False)):
        result = sanitize.judge(unseen[0], "racecheck", output, exit_code, 1.0, 60)
        assert sanitize.control_is_right(result) == right


def test_the_program_s_own_words_are_quoted(sanitize: ModuleType) -> None:
    race = "========= Error: Race reported between Write access and Read access\n"
    result = sanitize.judge("case", "racecheck", f"x\n{race}{DONE}\n{RACES}", 0, 1.0, 60)
    assert result.quote[0] == "Error: Race reported between Write access and Read access"
    result = sanitize.judge("case", "memcheck", f"ImportError: y\n{NOT_STARTED}", 1, 1.0, 60)
    assert result.trouble == "did not start: ImportError: y"


def pretend(folder: Path, version: str, does: str) -> str:
    """A program that says what a compute-sanitizer would."""
    path = folder / "compute-sanitizer"
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "Version {version}" && exit\n{does}\n'
    )
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("version", "summary", "code"), [("2025.3.1", RACES, 1), ("2026.4.0", NO_RACES, 0)]
)
def test_old_versions_are_warned_of_and_hazards_fail(
    sanitize: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    version: str,
    summary: str,
    code: int,
) -> None:
    program = pretend(tmp_path, version, f"printf '{DONE}\\n{summary}'")
    arguments = ["--sanitizer", program, "--tool", "racecheck", "--only", "plateau"]
    assert sanitize.main(arguments) == code
    assert ("WARNING: racecheck 2025.3.1" in capsys.readouterr().out) == (code == 1)


def test_a_slow_case_hides_no_other(
    sanitize: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    does = f'case "$*" in *"bad pages"*) sleep 60;; esac; printf \'{DONE}\\n{NO_ERRORS}\''
    program = pretend(tmp_path, "2026.4.0", does)
    arguments = ["--sanitizer", program, "--tool", "memcheck", "--timeout", "1", "--jobs", "1"]
    assert sanitize.main(arguments) == 1
    last = capsys.readouterr().out.split("NOT clean")[0].splitlines()[-len(sanitize.CASES) :]
    assert [line.split("  ")[0] for line in last] == list(sanitize.CASES)
    (slow,) = [line for line in last if "0 (0 s)" not in line]
    assert " ".join(slow.split()) == "bad pages did not end in 1 s"


def test_controls_are_chosen_by_what_is_said_of_them(sanitize: ModuleType, tmp_path: Path) -> None:
    """Without a folder for them a text that no case has is a mistake: nothing would run."""
    options = sanitize.parsed(["--only", "slots: the warps", "--build-controls", str(tmp_path)])
    assert sanitize.controls_with(options.only) == ["places"]
    for wrong in (["--only", "slots: the warps"], ["--only", "none", "--controls", str(tmp_path)]):
        with pytest.raises(SystemExit):
            sanitize.parsed(wrong)


def test_every_barrier_that_a_mutant_lacks_is_in_the_kernel(sanitize: ModuleType) -> None:
    """Else `--build-controls` fails, on a day when the GPU waits for it."""
    pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")
    from unittest.mock import patch

    from cutlass import cute

    from flashdsa.jit.loader import compile_plan
    from flashdsa.kernels.catalog import INDEXER

    controls = importlib.import_module("workbench.sanitizers.controls")
    real, found = cute.arch.barrier, {}

    def barrier(*args: object, **kwargs: object) -> object:
        owner, line = controls.traced(sys._getframe(1))
        found.setdefault(owner, set()).add(line)
        return real(*args, **kwargs)

    with patch.object(cute.arch, "barrier", barrier):
        compile_plan(INDEXER, sanitize.CONTROLS["right"].plan)
    fused = [c for c in sanitize.CONTROLS.values() if isinstance(c.case, controls.Fused)]
    lacking = [control.barrier for control in fused if control.barrier]
    assert len(lacking) >= 5
    assert [one for one in lacking if one[1] >= len(found.get(one[0], ()))] == []


@pytest.mark.parametrize(
    "name", ["left P", "right P", "sums", "decode P", "decode O", "few heads O"]
)
def test_every_wait_that_a_mutant_lacks_is_in_the_kernel(sanitize: ModuleType, name: str) -> None:
    """By its source: compiling them takes as long as all tests of this file."""
    pytest.importorskip("cutlass", reason="needs CuTe DSL, of which the kernel's sources are")
    from flashdsa.kernels.sparse_mla.sm90 import decode, few_heads, fwd
    from flashdsa.kernels.sparse_mla.sm90.decode import combine  # noqa: F401
    from flashdsa.kernels.sparse_mla.sm90.decode import right as _  # noqa: F401
    from flashdsa.kernels.sparse_mla.sm90.few_heads import merge  # noqa: F401
    from flashdsa.kernels.sparse_mla.sm90.fwd import epilogue, left, right  # noqa: F401

    control = sanitize.CONTROLS[name]
    function, barrier = control.wait
    kernel = {"right decode": decode, "right few heads": few_heads}.get(control.right, fwd)
    names = "combine", "epilogue", "left", "merge", "right"
    parts = [getattr(kernel, part, None) for part in names]
    owner = next(m for m in parts if hasattr(m, function))
    source = inspect.getsource(getattr(owner, function))
    assert f'"{barrier}")' in source or "other_sums).wait" in source
    assert barrier in {one.name for one in control.case.plan.barriers}


def test_results_are_written(sanitize: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "a GPU")
    sanitizer = sanitize.Sanitizer((2026, 4, 0), "/x")
    result = sanitize.judge("case", "memcheck", DONE + NO_ERRORS, 0, 1.0, 60)
    document = json.loads(json.dumps(sanitize.document(sanitizer, [result], [], None)))
    assert document["sanitizer"] == {"version": "2026.4.0", "path": "/x"}
    assert document["schema"] == "flashdsa-sanitizers/1"
    assert (document["gpu"], document["cases"][0]["reports"]) == ("a GPU", 0)
