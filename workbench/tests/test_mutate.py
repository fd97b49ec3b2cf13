"""Mutants of kernels, and NVIDIA's sanitizers on small calls."""

from __future__ import annotations

import inspect
import json
import re
import sys
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import pytest
from click.testing import CliRunner, Result

from flashdsa.errors import ArgumentValueError
from ptxemu import api, save_launch
from ptxemu.launch_setup import LaunchSetup
from ptxemu.memory.global_memory import GlobalMemory
from ptxemu.mutate.runner import SURVIVED
from tests import producer_consumer
from workbench.__main__ import cli
from workbench.cli.sanitize import calls_with, is_as_demanded, mutants_with
from workbench.mutation import campaign
from workbench.mutation.campaign import PEERS, Campaign, Peer, staleness
from workbench.sanitizers import run
from workbench.sanitizers.controls import CONTROLS, build, traced
from workbench.small_calls.call import path_of_launch
from workbench.small_calls.table import TABLE

NAME = "small-sm_100a"
ROW = Peer("sm_100a", "k", "script.py", ("",))


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A kernel of thirteen mutants, whose launch has been saved; no argument."""
    monkeypatch.setattr(campaign, "RESULTS", tmp_path)
    memory = GlobalMemory()
    arrays = tuple(producer_consumer.arrays())
    for number, array in enumerate(arrays):
        memory.register(array, f"array {number}")
    module = api.load(producer_consumer.TEXT)
    setup = LaunchSetup(module, "k", 1, producer_consumer.THREADS, arrays, memory)
    save_launch(setup, path_of_launch(tmp_path, NAME, 0))
    return tmp_path


def rows_in(folder: Path) -> list[dict[str, object]]:
    """The lines of the kernel's mutants, with the first and the last."""
    return [json.loads(line) for line in (folder / f"{NAME}.jsonl").read_text().splitlines()]


def write_rows(folder: Path, rows: list[dict[str, object]]) -> None:
    (folder / f"{NAME}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_can_be_stopped_repeated_and_argued_about(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def tried(*, again: bool) -> int:
        capsys.readouterr()
        Campaign(NAME, ROW, folder, folder).try_all(1, again)
        return len(re.findall(rf"^{NAME} ", capsys.readouterr().err, re.M))

    assert tried(again=False) == 13
    head, *mutants, end = rows_in(folder)
    assert end == {"mutants": 13}
    (survivor,) = [m for m in mutants if m["verdict"] == SURVIVED]

    # A run that was stopped after the fifth mutant.
    write_rows(folder, [head, *mutants[:5]])
    assert tried(again=False) == 13 - 5
    assert len(rows_in(folder)) == 15

    # What survived is tried again, until it is argued; a whole run begins anew.
    assert tried(again=True) == 1
    assert tried(again=True) == 1
    (folder / "equivalent").mkdir()
    name = f"{survivor['category']}#{survivor['number']} {survivor['mutation']}"
    (folder / f"equivalent/{NAME}.txt").write_text(f"{name}: nothing follows\n")
    assert tried(again=True) == 0
    report, strangers = Campaign(NAME, ROW, folder, folder).try_all(1, True)
    assert report.survivors == strangers == []
    assert tried(again=False) == 13

    # So is one that was tried by a stopped run, before there was an argument.
    write_rows(folder, [head, *mutants])
    report, _ = Campaign(NAME, ROW, folder, folder).try_all(1, False)
    assert [r.how for r in report.results if r.verdict == "equivalent"] == ["nothing follows"]


def test_mutants_of_another_kernel_do_not_stand(folder: Path) -> None:
    write_rows(folder, [{"ptx": "another", "calls": [""]}, {"mutants": 0}])
    with pytest.raises(ArgumentValueError, match=r"small-sm_100a\.jsonl: of another kernel"):
        Campaign(NAME, ROW, folder, folder).try_all(1, True)


def test_counts_are_of_the_ptx_that_they_name(folder: Path) -> None:
    assert staleness(NAME, folder)[0] is None
    one = Campaign(NAME, ROW, folder, folder)
    report, _ = one.try_all(1, False, limit=3)
    assert not (folder / f"{NAME}.jsonl").exists()
    counted = one.counted(report)
    assert (counted["name"], counted["arch"], counted["mutants"]) == (NAME, "sm_100a", 3)
    campaign.write_row({**counted, "ptx": "another"})
    assert staleness(NAME, folder) == ("another", one.ptx)
    campaign.write_row(counted)
    assert staleness(NAME, folder) == (one.ptx, one.ptx)
    assert len(campaign.read_rows()) == 1


def test_the_page_has_the_table_of_the_counts() -> None:
    """Else workbench.mutation.campaign.write_row writes it with the next row."""
    rows = campaign.read_rows()
    (block,) = campaign.BLOCK.findall((campaign.RESULTS / "README.md").read_text())
    assert block == campaign.markdown(rows)
    synchronising = {name for name, row in TABLE.items() if row.repeated}
    assert {row["name"] for row in rows} <= synchronising | set(PEERS)
    for row in rows:
        assert sum(row[verdict] for verdict in campaign.VERDICTS) == row["mutants"], row["name"]
        assert row["name"] in PEERS or re.fullmatch("[0-9a-f]{16}", row["ptx"]), row["name"]


def test_every_argument_is_of_a_row() -> None:
    files = {path.stem for path in (campaign.RESULTS / "equivalent").glob("*.txt")}
    assert files <= {row["name"] for row in campaign.read_rows()}


RACES = "========= RACECHECK SUMMARY: 4 hazards displayed (3 errors, 1 warning)\n"
NO_RACES = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
NO_ERRORS = "========= ERROR SUMMARY: 0 errors\n"
DONE = "right index-kl: some call (1.0 s)"
NOT_STARTED = "========= Error: Target application terminated before first instrumented API call\n"


def test_the_newest_that_tells_its_version_is_taken() -> None:
    said = {
        "/usr/bin/a": "Copyright\nVersion 2025.3.1.0 (build 36498837) (public-release)\n",
        "/pip/b": "NVIDIA (R) Compute Sanitizer\nVersion 2026.4.0.0 (build 39022338)\n",
        "/broken/c": "",
        "/usr/bin/d": "Version 2026.10\n",
    }

    def ask(path: str) -> tuple[int, ...]:
        return run.version_in(said[path])

    assert run.newest(list(said)[:3], ask).name == "2026.4.0.0"
    assert run.newest(said, ask).path == "/usr/bin/d"
    assert run.newest(["/broken/c"], ask) is None


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
def test_summaries_are_read(output: str, counts: tuple[int, int] | None) -> None:
    assert run.counts_in(output) == counts


def judged(output: str, exit_code: int | None = 0) -> tuple[str, bool, bool]:
    """(cell, whether a case is clean, whether a mutant's control is right)."""
    case = run.judge("candidates", "racecheck", output, exit_code, 8.4, 60)
    return case.cell, case.clean, is_as_demanded(CONTROLS["candidates"], case)


def test_silence_is_no_success() -> None:
    done = DONE + "\n"
    assert judged(done + NO_RACES) == ("0 (8 s)", True, False)
    assert judged(done + RACES) == ("3 + 1 warnings (8 s)", False, True)
    assert judged(NO_RACES) == ("failed", False, False)
    assert judged("WRONG row: some call\n" + NO_RACES, 1)[0] == "failed"
    assert judged(done) == ("did not start", False, False)
    assert judged("No module named x\n" + NOT_STARTED, 1)[:2] == ("did not start", False)
    assert judged("", None) == ("did not end in 60 s", False, False)


def test_what_racecheck_cannot_see_must_end() -> None:
    unseen = [name for name, control in CONTROLS.items() if control.unseen]
    assert len(unseen) < len(CONTROLS) / 2
    for output, exit_code, right in ((f"ended x\n{NO_RACES}", 0, True), ("", None, False)):
        result = run.judge(unseen[0], "racecheck", output, exit_code, 1.0, 60)
        assert is_as_demanded(CONTROLS[unseen[0]], result) == right


def test_the_program_s_own_words_are_quoted() -> None:
    race = "========= Error: Race reported between Write access and Read access\n"
    result = run.judge("case", "racecheck", f"x\n{race}{DONE}\n{RACES}", 0, 1.0, 60)
    assert result.quote[0] == "Error: Race reported between Write access and Read access"
    result = run.judge("case", "memcheck", f"ImportError: y\n{NOT_STARTED}", 1, 1.0, 60)
    assert result.trouble == "did not start: ImportError: y"


def pretend(folder: Path, version: str, does: str) -> str:
    """A program that says what a compute-sanitizer would."""
    path = folder / "compute-sanitizer"
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "Version {version}" && exit\n{does}\n'
    )
    path.chmod(0o755)
    return str(path)


def sanitize(*arguments: str) -> Result:
    """The command, on what calls itself a GPU."""
    with patch("torch.cuda.get_device_name", return_value="a GPU"):
        return CliRunner().invoke(cli, ["sanitize", *arguments])


@pytest.mark.parametrize(
    ("version", "summary", "code"), [("2025.3.1", RACES, 1), ("2026.4.0", NO_RACES, 0)]
)
def test_old_versions_are_warned_of_and_hazards_fail(
    tmp_path: Path, version: str, summary: str, code: int
) -> None:
    program = pretend(tmp_path, version, f"printf '{DONE}\\n{summary}'")
    done = sanitize("--sanitizer", program, "--tool", "racecheck", "--only", "plateau")
    assert done.exit_code == code, done.output
    assert ("WARNING: racecheck 2025.3.1" in done.stderr) == (code == 1)


def test_a_slow_case_hides_no_other_and_results_are_written(tmp_path: Path) -> None:
    does = f'case "$*" in *"16 heads"*) sleep 60;; esac; printf \'{DONE}\\n{NO_ERRORS}\''
    program = pretend(tmp_path, "2026.4.0", does)
    out = tmp_path / "out.json"
    only = ["--only", "indexer-sm_90a", "--tool", "memcheck", "--timeout", "1", "--jobs", "1"]
    done = sanitize("--sanitizer", program, *only, "--out", str(out), "--json")
    assert done.exit_code == 1, done.output
    document = json.loads(out.read_text())
    assert json.loads(done.stdout) == document
    assert [case["case"] for case in document["cases"]] == calls_with("indexer-sm_90a")
    assert document["sanitizer"] == {"version": "2026.4.0", "path": program}
    slow = {case["trouble"] for case in document["cases"] if "16 heads" in case["case"]}
    assert slow == {"did not end in 1 s"}
    others = [case for case in document["cases"] if "16 heads" not in case["case"]]
    assert others and all(case["reports"] == 0 and not case["trouble"] for case in others)


def test_mutants_are_chosen_by_what_is_said_of_them(tmp_path: Path) -> None:
    """A text that no call has is a mistake if mutants have no folder: nothing would run."""
    assert mutants_with("slots: the warps") == ["places"]
    for wrong in (["--only", "slots: the warps"], ["--only", "none", "--controls", str(tmp_path)]):
        done = sanitize(*wrong)
        assert done.exit_code == 2 and "no call has" in done.output
    program = pretend(tmp_path, "2026.4.0", "")
    chosen = "--only", "slots: the warps", "--sanitizer", program
    done = sanitize(*chosen, "--controls", str(tmp_path))
    assert done.exit_code == 2 and "lacks places; make it with --build-controls" in done.output


@pytest.mark.parametrize("name", CONTROLS)
def test_a_mutant_s_call_is_in_the_table(name: str) -> None:
    control = CONTROLS[name]
    assert not control.small_call.emulated_only
    assert f"{control.row}: {control.call}" in calls_with("")


def test_a_mutant_is_built_and_asked(tmp_path: Path) -> None:
    """The quickest of them; a plan that the kernel is compiled ahead for."""
    pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")
    assert build("order", tmp_path).keys() == {"lane-race", "shuffle-order"}
    plan = json.loads((tmp_path / "order.json").read_text())["plan"]
    assert plan in {variant.name for variant in TABLE["indexer-order-sm_90a"].spec.variants}
    assert (tmp_path / "order.so").exists()


def test_every_barrier_that_a_mutant_lacks_is_in_the_kernel() -> None:
    """Else `--build-controls` fails, on a day when the GPU waits for it."""
    pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")
    from cutlass import cute

    from flashdsa.jit.loader import compile_plan
    from flashdsa.kernels.catalog import INDEXER

    real, found = cute.arch.barrier, {}

    def barrier(*args: object, **kwargs: object) -> object:
        owner, line = traced(sys._getframe(1))
        found.setdefault(owner, set()).add(line)
        return real(*args, **kwargs)

    with patch.object(cute.arch, "barrier", barrier):
        compile_plan(INDEXER, CONTROLS["warp sums"].small_call.kernel_plan)
    mutants = [c.mutate for c in CONTROLS.values() if c.row == "indexer-sm_90a"]
    lacking = [one.args for one in mutants if one.func.__name__ == "without_barrier"]
    assert len(lacking) >= 5
    assert [one for one in lacking if one[1] >= len(found.get(one[0], ()))] == []


@pytest.mark.parametrize(
    "name",
    [
        "P of tile 1", "P of tile 0", "sums", "decode P", "decode O", "few heads O", "stream-K ticket",
        "stream-K halves",
    ],
)  # fmt: skip
def test_every_wait_that_a_mutant_lacks_is_in_the_kernel(name: str) -> None:
    """Its source is read: compiling the kernels takes as long as all tests of this file."""
    pytest.importorskip("cutlass", reason="needs CuTe DSL, of which the kernel's sources are")
    control = CONTROLS[name]
    function, barrier = control.mutate.args
    spec = TABLE[control.row].spec
    folder = spec.build.partition(":")[0].rpartition(".")[0]
    package = Path(import_module(folder).__path__[0])
    parts = [import_module(f"{folder}.{path.stem}") for path in package.glob("*.py")]
    parts += [one for part in parts for one in vars(part).values() if inspect.ismodule(one)]
    owner = next(m for m in parts if hasattr(m, function))
    source = inspect.getsource(getattr(owner, function))
    assert re.search(rf"\bmemory\.{barrier}\b", source)
    assert re.search(r"\.wait(_\w+)?\(|meet_consumers\(", source)
    assert barrier in {one.name for one in spec.plans[0].barriers}
