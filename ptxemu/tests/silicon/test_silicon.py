"""ptxemu does what an H200 did: every program of `programs/` against its recording."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.silicon import emulate
from tests.silicon.programs import all_programs
from tests.silicon.programs.case import Program
from tests.silicon.silicon_archive import Archive

from ptxemu.errors import ExecutionError

ARCHIVE = Archive.load()


def _families() -> dict[str, list[Program]]:
    families: dict[str, list[Program]] = {}
    for program in all_programs():
        families.setdefault(program.name.partition("/")[0], []).append(program)
    return families


@pytest.mark.parametrize("program", [pytest.param(p, id=p.name) for p in all_programs()])
def test_program_does_what_the_hardware_did(program: Program) -> None:
    recording = ARCHIVE.programs.get(program.name)
    if recording is None:
        pytest.skip("not recorded yet")
    if recording.digest != program.digest():
        pytest.skip("the program changed after its recording: not recorded yet")
    if recording.status == "ok":
        assert not emulate.differences(program, emulate.run(program), recording.results)
    elif recording.status.startswith("7"):  # the kernel ran and failed: so must ptxemu
        with pytest.raises(ExecutionError):
            emulate.run(program)
    else:
        pytest.skip(f"hardware gave no result: {recording.status}")


def test_every_family_has_programs_of_distinct_inputs() -> None:
    families = _families()
    assert len(families) == 24
    digests = [p.digest() for p in all_programs()]
    assert len(set(digests)) == len(digests)


def test_recordings_are_few_bytes() -> None:
    folder = Path(__file__).parent / "recordings"
    assert sum(p.stat().st_size for p in folder.glob("*")) < 450_000
