"""Liveness, control flow and roles on instructions written by hand; functions of one role."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flashdsa.kernels.catalog import MLA_BWD_DKV
from flashdsa.plan.roles import Role
from workbench.analysis.flow import (
    common_dominator,
    dominated,
    dominators,
    live_registers,
    nearest,
    successors,
)
from workbench.analysis.role_functions import Lines, RoleLines, role_functions
from workbench.analysis.roles import find_regions
from workbench.analysis.sass import Code, Instruction, Line


def code(*rows: str, lines: dict[int, Line] | None = None, called_from: int | None = None) -> Code:
    """Rows such as "L: @P0 FADD 3 = 1 2" or "BRA L", "BRA P0 L": writes = reads."""
    labels: dict[str, int] = {}
    instructions = []
    for index, row in enumerate(rows):
        label, _, rest = row.rpartition(": ")
        if label:
            labels[f".L_x_{label}"] = index
        words = rest.split()
        guard = words.pop(0) if words[0].startswith("@") else ""
        opcode, operands = words[0], words[1:]
        targets = tuple(f".L_x_{w}" for w in operands if w.isdigit() and opcode in JUMPS)
        conditions = [w for w in operands if w.startswith("P")]
        written, _, read = ("", "", "") if opcode in JUMPS else " ".join(operands).partition("=")
        shown = " ".join([opcode, *conditions, *(f"`({t})" for t in targets), *_numbers(operands)])
        instructions.append(
            Instruction(
                address=16 * index, text=f"{guard} {shown}".strip(), opcode=opcode, guard=guard,
                reads=sum(1 << int(r) for r in read.split()),
                writes=sum(1 << int(w) for w in written.split()) if "=" in rest else 0, live=0,
                targets=targets, line=(lines or {}).get(index),
            )
        )  # fmt: skip
    return Code("k", tuple(instructions), labels, called_from)


JUMPS = {"BRA", "CALL", "BSSY", "BRX"}


def _numbers(operands: list[str]) -> list[str]:
    return [word for word in operands if word.startswith("0x") or word.startswith("B")]


def counts(program: Code) -> list[int]:
    """Live registers of each instruction."""
    return live_registers(program, successors(program)).counts


def test_a_value_is_live_from_its_write_to_its_last_read() -> None:
    program = code("MOV 0 =", "MOV 1 =", "FADD 2 = 0 1", "STG = 2 1", "EXIT")
    assert counts(program) == [1, 2, 2, 2, 0]


def test_a_value_read_around_a_loop_is_live_in_all_of_it() -> None:
    program = code("MOV 0 =", "1: MOV 1 =", "STG = 1", "@P0 BRA 1", "STG = 0", "EXIT")
    assert counts(program) == [1, 2, 2, 1, 1, 0]


def test_a_guarded_write_does_not_end_the_value_before_it() -> None:
    assert counts(code("MOV 0 =", "NOP", "@P0 MOV 0 =", "STG = 0", "EXIT"))[1] == 1
    assert counts(code("MOV 0 =", "NOP", "MOV 0 =", "STG = 0", "EXIT"))[1] == 0


def test_a_register_that_nothing_has_written_holds_nothing() -> None:
    program = code("NOP", "@P0 MOV 3 =", "@P0 STG = 3", "EXIT")
    assert counts(program)[0] == 0


def test_a_call_counts_what_the_callee_holds_on_top_of_what_is_kept() -> None:
    program = code(
        "MOV 0 =", "MOV 1 =", "CALL 9", "STG = 0 2", "EXIT",
        "9: MOV 2 = 1", "MOV 5 =", "MOV 6 =", "FADD 2 = 5 6", "RET",
        called_from=5,
    )  # fmt: skip
    assert counts(program)[2] == 1 + len({1, 2, 5, 6})


def test_branches_fall_through_only_where_they_may() -> None:
    program = code("BRA 1", "NOP", "1: BRA P0 2", "NOP", "2: @P0 EXIT", "BSSY B0 3", "3: EXIT")
    assert successors(program) == [[2], [2], [3, 4], [4], [5], [6], []]


def test_the_nearest_writer_made_the_value() -> None:
    program = code("MOV 0 =", "MOV 1 =", "1: MOV 0 =", "STG = 0 1", "@P0 BRA 1", "EXIT")
    edges = successors(program)
    back: list[list[int]] = [[] for _ in edges]
    for index, following in enumerate(edges):
        for target in following:
            back[target].append(index)
    live = live_registers(program, edges)
    made = nearest(program, live.writes, back, 3, 0b11)
    assert {register: one.address // 16 for register, one in made.items()} == {0: 2, 1: 1}


def test_dominators_of_a_diamond() -> None:
    program = code("@P0 BRA 1", "NOP", "BRA 2", "1: NOP", "2: NOP", "EXIT")
    above = dominators(successors(program))
    assert above == [0, 0, 1, 0, 0, 4]
    assert common_dominator([1, 2], above, 1.0) == 1
    assert common_dominator([2, 3], above, 1.0) == 0
    assert common_dominator([1, 2, 2, 3], above, 0.75) == 1
    assert dominated(1, above) == {1, 2}


def planned(name: str, file: str) -> RoleLines:
    """A role whose code is of the first line of a file."""
    return RoleLines(Role(name, 128, 40, ""), (Lines(file, 1, 1),))


def test_a_role_is_what_only_its_warps_reach_and_has_their_setmaxnreg() -> None:
    load, rank, shared = Line("load.py", 1), Line("rank.py", 1), Line("kernel.py", 1)
    rows = (
        "S2R 0 =", "@P0 BRA 1", "USETMAXREG 0x18", "LDG 1 =", "STS = 1", "BRA 2",
        "1: USETMAXREG 0x98", "LDS 1 =", "2: BAR", "EXIT",
    )  # fmt: skip
    lines = dict.fromkeys(range(10), shared) | {3: load, 4: load, 7: rank}
    program = code(*rows, lines=lines)
    edges = successors(program)
    found = find_regions(program, edges, (planned("load", "load.py"), planned("rank", "rank.py")))
    assert [(r.name, sorted(r.instructions), r.registers) for r in found] == [
        ("load", [2, 3, 4, 5], 24),
        ("rank", [6, 7], 152),
    ]
    without = find_regions(code(*rows), edges, (planned("load", "load.py"),))
    assert [(r.registers, sorted(r.instructions)) for r in without] == [
        (None, [0, 1]),
        (24, [2, 3, 4, 5, 8, 9]),
        (152, [6, 7, 8, 9]),
    ]


def test_one_instruction_with_another_roles_line_does_not_move_a_role() -> None:
    load, rank = Line("load.py", 1), Line("rank.py", 1)
    rows = ["@P0 BRA 1", *["LDG 1 ="] * 12, "EXIT", "1: LDS 1 =", *["LDS 1 ="] * 12, "EXIT"]
    lines = dict.fromkeys(range(1, 13), load) | dict.fromkeys(range(14, 27), rank) | {20: load}
    program = code(*rows, lines=lines)
    roles = (planned("load", "load.py"), planned("rank", "rank.py"))
    found = find_regions(program, successors(program), roles)
    inside = {region.name: sorted(region.instructions) for region in found}
    assert inside == {"load": list(range(1, 14)), "rank": list(range(14, 28))}


def functions(lines: tuple[Lines, ...]) -> set[str]:
    """Names of the functions and classes at these lines."""
    found = set()
    for one in lines:
        own = Path(one.file).read_text().splitlines()[one.first - 1 : one.last]
        found |= {
            line.split("(")[0].split()[1] for line in own if line.startswith(("def", "class"))
        }
    return found


def test_a_role_has_what_only_it_runs() -> None:
    found = {role: functions(lines) for role, lines in role_functions(MLA_BWD_DKV).items()}
    # From the entry on, across files, to the DSL.
    assert {"multiply_all", "multiply_tile", "add_tile", "add4_if"} <= found["multiply"]
    assert {"load_matrices", "matrix_offset"} <= found["matrices"]
    assert {"copy_all", "copy_part"} <= found["rows"]
    # Two roles run these, and every role is constructed with a context by the kernel.
    for shared in ("first_tile", "locate", "Context"):
        assert not any(shared in of_role for of_role in found.values())


def test_a_name_that_the_kernel_does_not_know_is_an_error() -> None:
    with pytest.raises(KeyError, match="multiply_some"):
        role_functions(replace(MLA_BWD_DKV, roles={"multiply": ("multiply_some",)}))
