"""ptxemu does what an H200 did: every program of `programs/` against its recording."""

import pytest
from tests.silicon import emulate
from tests.silicon.programs import all_programs
from tests.silicon.programs.case import Program
from tests.silicon.silicon_archive import Archive

from ptxemu.errors import ExecutionError
from ptxemu.sched.policy import Policy

ARCHIVE = Archive.load()
PROGRAMS = list(all_programs())
UNANSWERED = "im2col/load.4d.empty_box"
"""The driver refuses its tensor map: there is no result to compare with."""
MOST_PROGRAMS = 150
"""Of one item: a part of a family."""


def _parts() -> dict[str, list[Program]]:
    """Deal each family's programs to parts, so that processes share the large ones."""
    parts: dict[str, list[Program]] = {}
    for family, programs in _families().items():
        count = -(-len(programs) // MOST_PROGRAMS)
        for part in range(count):
            parts[f"{family}-{part}"] = programs[part::count]
    return parts


def _families() -> dict[str, list[Program]]:
    families: dict[str, list[Program]] = {}
    for program in PROGRAMS:
        if program.name != UNANSWERED:
            families.setdefault(program.name.partition("/")[0], []).append(program)
    return families


PARTS = _parts()


def _wrong(program: Program, policy: Policy | None = None) -> str:
    """Say how ptxemu differs from the recording; empty where it does not."""
    recording = ARCHIVE.programs.get(program.name)
    if recording is None or recording.digest != program.digest():
        return "not recorded, or changed since"
    failed = recording.status.startswith("7")  # the kernel ran and failed: so must ptxemu
    if recording.status != "ok" and not failed:
        return f"hardware gave no result: {recording.status}"
    try:
        results = emulate.run(program, policy)
    except ExecutionError as error:
        return "" if failed else str(error)
    if failed:
        return f"hardware stopped with {recording.status}, ptxemu did not"
    return str(emulate.differences(program, results, recording.results) or "")


@pytest.mark.parametrize("part", PARTS)
def test_programs_do_what_the_hardware_did(part: str) -> None:
    assert _all_wrong(PARTS[part]) == {}


def _all_wrong(programs: list[Program], policy: Policy | None = None) -> dict[str, str]:
    assert programs
    return {p.name: how for p in programs if (how := _wrong(p, policy))}


@pytest.mark.parametrize("asynchronous", ["eager", "late"])
@pytest.mark.parametrize(
    "prefix", ["copies/step", "copies/tensor", "tma/load.type7", "bulk/pair", "cp_async/ca.16"]
)
def test_results_of_copies_do_not_depend_on_the_schedule(prefix: str, asynchronous: str) -> None:
    chosen = [program for program in PROGRAMS if program.name.startswith(prefix)]
    assert _all_wrong(chosen, Policy(asynchronous, "round_robin")) == {}


def test_every_family_has_programs_of_distinct_inputs() -> None:
    families = _families()
    assert len(families) == 25
    digests = [p.digest() for p in PROGRAMS]
    assert len(set(digests)) == len(digests)
