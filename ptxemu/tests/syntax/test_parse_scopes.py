"""Scopes in braces, labels and line information."""

import pytest

from ptxemu.errors import PtxSyntaxError
from ptxemu.syntax.ast import Symbol

WAIT = """{{
.reg .pred P1;
LAB_WAIT:
mbarrier.try_wait.parity.shared::cta.b64 P1, [%r1], {parity};
@P1 bra DONE;
bra LAB_WAIT;
DONE:
}}
"""


def targets(kernel):
    return [i.operands[0] for i in kernel.instructions if i.modifiers[0] == "bra"]


def test_labels_name_the_instruction_that_follows(parse_kernel):
    kernel = parse_kernel("A: B: add.s32 %r1, %r1, 1; bra.uni A;\n@%p1 bra END; C : bra B; END:")
    assert kernel.labels == {"A": 0, "B": 0, "C": 3, "END": 4}
    assert targets(kernel) == [Symbol("A"), Symbol("END"), Symbol("B")]


def test_a_label_may_stand_at_the_end(parse_text):
    kernel = parse_text(".entry k { ret; $L__func_end0: }").functions["k"]
    assert kernel.labels == {"$L__func_end0": len(kernel.instructions)}


def test_inline_asm_repeats_labels_and_registers(parse_kernel):
    kernel = parse_kernel(WAIT.format(parity=0) + "bar.sync 0;\n" + WAIT.format(parity=1))
    assert kernel.labels == {"LAB_WAIT@1": 0, "DONE@1": 3, "LAB_WAIT@2": 4, "DONE@2": 7}
    assert [t.name for t in targets(kernel)] == ["DONE@1", "LAB_WAIT@1", "DONE@2", "LAB_WAIT@2"]
    first, second = kernel.instructions[0].operands[0], kernel.instructions[4].operands[0]
    assert (first.name, second.name) == ("P1@1", "P1@2")
    assert first.slot != second.slot
    assert kernel.instructions[1].guard.register is first


def test_the_innermost_declaration_is_meant(parse_kernel):
    kernel = parse_kernel(
        ".reg .b32 a; mov.b32 a, 1;\n"
        "{ mov.b32 a, 2; .reg .f32 a; mov.f32 a, 3;\n"
        "{ .reg .b64 a; mov.b64 a, 4; } mov.f32 a, 5; }\n"
        "mov.b32 a, 6; { .reg .b16 %r<3>; mov.b16 %r1, 7; mov.b32 %r3, 8; }"
    )
    declared = [i.operands[0] for i in kernel.instructions[:-1]]
    assert [r.type for r in declared] == ["b32", "b32", "f32", "b64", "f32", "b32", "b16", "b32"]
    assert [r.name for r in declared] == ["a", "a", "a@1", "a@2", "a@1", "a", "%r1@3", "%r3"]


def test_a_forward_branch_means_the_label_of_its_own_scope_first(parse_kernel):
    kernel = parse_kernel("bra L; { bra L; bra M; L: exit; } { bra L; } L: exit; M: exit;")
    assert [t.name for t in targets(kernel)] == ["L", "L@1", "M", "L"]


def test_a_label_in_a_scope_is_not_seen_from_outside(parse_kernel):
    with pytest.raises(PtxSyntaxError, match="INSIDE is not declared"):
        parse_kernel("{ INSIDE: exit; }\nbra INSIDE;")


def test_branch_and_call_tables(parse_kernel):
    kernel = parse_kernel(
        "{ ts: .branchtargets A, B, A;\nbrx.idx %r1, ts;\nA: exit; }\nB:\n"
        "tl: .calltargets f, g;\ncall %rd1, tl;",
        module=".func f;\n.func g;",
    )
    assert kernel.branch_targets == {"ts@1": ("A@1", "B", "A@1")}
    assert kernel.instructions[0].operands[1] == Symbol("ts@1")
    assert kernel.call_targets == {"tl": ("f", "g")}
    assert set(kernel.labels) == {"A@1", "B"}


def test_lines_and_loc(parse_text):
    module = parse_text(
        ".entry k {\n.reg .b32 %r<3>;\n.loc 1 7 0\n\nmov.b32 %r1, 1; mov.b32\n%r2, 2;\n"
        ".loc\t2 30 4, function_name $L__info_string0, inlined_at 1 9 5\nmov.b32 %r2, 3;\n"
        ".loc 2 31 4, function_name $L__info_string0+12, inlined_at 1 9 5 mov.b32 %r2, 4;\n"
        ".loc 1 0 0\nret;\n}\n.entry m { ret; }\n"
        '.file 1 "/a//b.cu"\n.file\t2 "lib; {.py", 123, 456\n'
    )
    spans = [i.span for i in module.functions["k"].instructions]
    assert [s.ptx_line for s in spans] == [8, 8, 11, 12, 14]
    assert [(s.source_file, s.source_line) for s in spans] == [
        ("/a//b.cu", 7),
        ("/a//b.cu", 7),
        ("lib; {.py", 30),
        ("lib; {.py", 31),
        (None, None),
    ]
    assert module.functions["m"].instructions[0].span.source_file is None
    assert str(spans[2]) == "PTX line 11 (lib; {.py:30)"


def test_functions_have_registers_and_labels_of_their_own(parse_text):
    module = parse_text(
        ".entry a { .reg .b32 %r<2>; L: mov.b32 %r1, 1; bra L; }\n"
        ".entry b { .reg .b64 %r<2>; mov.b64 %r1, 1; L: bra L; }"
    )
    a, b = module.functions.values()
    assert (a.registers[0].type, b.registers[0].type) == ("b32", "b64")
    assert (a.labels, b.labels) == ({"L": 0}, {"L": 1})
