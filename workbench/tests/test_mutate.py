"""`python -m workbench mutate`: a stopped run goes on, --again tries what was not caught."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from flashdsa.errors import ArgumentValueError
from ptxemu import api, save_launch
from ptxemu.launch_setup import LaunchSetup
from ptxemu.memory.global_memory import GlobalMemory
from ptxemu.mutate.runner import SURVIVED
from tests import producer_consumer
from workbench.mutation import campaign
from workbench.mutation.campaign import PEERS, Campaign, Peer, staleness
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
