"""workbench/mutation/kernels.py: a stopped run goes on, and --again tries what was not caught."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from ptxemu import api, save_launch
from ptxemu.launch_setup import LaunchSetup
from ptxemu.memory.global_memory import GlobalMemory
from tests import producer_consumer
from workbench.mutation.tables import COLUMNS, read_table, write_table

ROOT = Path(__file__).parents[2]
NAME = "small"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """The tool with a kernel of thirteen mutants, whose launch has been saved; no argument."""
    tool = importlib.import_module("workbench.mutation.kernels")
    launches = importlib.import_module("workbench.mutation.launches")
    origin = launches.Script("sm_100a", "script.py", ())
    monkeypatch.setitem(launches.ALL, NAME, launches.Launches("k", (origin,)))
    monkeypatch.setattr(tool, "RESULTS", tmp_path)
    memory = GlobalMemory()
    arrays = tuple(producer_consumer.arrays())
    for number, array in enumerate(arrays):
        memory.register(array, f"array {number}")
    module = api.load(producer_consumer.TEXT)
    setup = LaunchSetup(module, "k", 1, producer_consumer.THREADS, arrays, memory)
    save_launch(setup, launches.path_of_launch(tmp_path, NAME, 0))
    yield tool


def facts(folder: Path) -> dict[str, dict[str, str]]:
    """Of the results, by site and mutation."""
    document = read_table(folder / f"mutation-{NAME}.json")
    return {f"{m['category']}#{m['number']} {m['mutation']}": m for m in document["mutants"]}


def test_results_can_be_stopped_repeated_and_argued_about(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def tried(*, again: bool) -> int:
        capsys.readouterr()
        tool.Campaign(NAME, tmp_path, tmp_path).try_all(1, again)
        return sum(line.startswith(f"{NAME} ") for line in capsys.readouterr().out.splitlines())

    assert tried(again=False) == 13
    whole = facts(tmp_path)
    (survivor,) = [name for name, m in whole.items() if m["verdict"] == "survived"]

    # A run that was stopped behind the fifth mutant.
    some = [json.dumps(m) for m in list(whole.values())[:5]]
    (tmp_path / f"mutation-{NAME}.tried").write_text("\n".join(some) + "\n")
    assert tried(again=False) == 13 - 5
    verdicts = {name: m["verdict"] for name, m in facts(tmp_path).items()}
    assert verdicts == {name: m["verdict"] for name, m in whole.items()}
    assert not list(tmp_path.glob("*.tried"))

    # What survived is tried again, until it is argued.
    assert tried(again=True) == 1
    (tmp_path / "equivalent").mkdir()
    (tmp_path / f"equivalent/{NAME}.txt").write_text(f"{survivor}: nothing follows\n")
    assert tried(again=True) == 0
    argued = facts(tmp_path)[survivor]
    assert (argued["verdict"], argued["how"]) == ("equivalent", "nothing follows")

    # So is one that was tried by a stopped run, before there was an argument.
    lines = [json.dumps(m) for m in whole.values()]
    (tmp_path / f"mutation-{NAME}.tried").write_text("\n".join(lines) + "\n")
    assert tried(again=False) == 0
    assert facts(tmp_path)[survivor]["verdict"] == "equivalent"


def test_results_of_another_kernel_are_refused(tool: ModuleType, tmp_path: Path) -> None:
    campaign = tool.Campaign(NAME, tmp_path, tmp_path)
    other = {"launch": "script.py", "ptx": "another", "mutants": []}
    write_table(tmp_path / f"mutation-{NAME}.json", other)
    with pytest.raises(SystemExit, match="small: the results are of another kernel"):
        campaign.try_all(1, True)


def test_results_of_other_ptx_are_listed(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.is_stale(NAME, tmp_path)  # no results
    tool.Campaign(NAME, tmp_path, tmp_path).try_all(1, False)
    assert not tool.is_stale(NAME, tmp_path)
    results = tmp_path / f"mutation-{NAME}.json"
    document = read_table(results)
    write_table(results, {**document, "ptx": "another"})
    capsys.readouterr()
    assert tool.is_stale(NAME, tmp_path)
    assert capsys.readouterr().out == f"{NAME}: stale: of another, and it is {document['ptx']}\n"


def test_results_of_our_kernels_name_the_ptx_that_they_are_of(tool: ModuleType) -> None:
    for name in tool.KERNELS:
        results = ROOT / f"workbench/results/mutation/mutation-{name}.json"
        if results.exists():
            assert re.fullmatch("[0-9a-f]{16}", read_table(results)["ptx"]), name


def test_results_are_of_kernels_that_the_tool_knows(tool: ModuleType) -> None:
    results = (ROOT / "workbench/results/mutation").glob("mutation-*.json")
    assert {path.stem for path in results} <= {f"mutation-{name}" for name in tool.ALL}


def test_tables_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "mutation.json"
    whole = {"category": "arrive", "number": 1, "verdict": "caught", "message": "race"}
    document = {"kernel": "k", "mutants": [whole, {"category": "order", "verdict": "survived"}]}
    write_table(path, document)
    assert read_table(path) == document
    first, second = json.loads(path.read_text())["mutants"]
    assert len(second) < len(first) == len(COLUMNS)
    with pytest.raises(ValueError, match="got seconds"):
        write_table(path, {"mutants": [{"seconds": 1.0}]})
