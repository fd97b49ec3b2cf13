"""Errors of the parser say where and what; scopes of names; large files."""

import pytest

from ptxemu.errors import PtxEmuError, PtxSyntaxError
from ptxemu.syntax.ast import Symbol
from ptxemu.syntax.parser import parse_module

# What is no PTX is refused with the line and the text that is wrong.

FIRST = 7
"""The PTX line on which a body begins."""


@pytest.mark.parametrize(
    ("body", "line", "message"),
    [
        (
            "\nmov.b32 %r1, %r77;",
            FIRST + 1,
            "register %r77 is not declared, in 'mov.b32 %r1, %r77'",
        ),
        ("mov.b32 %r10, 1;", FIRST, "register %r10 is not declared"),
        ("mov.b32 desc, 1;", FIRST, "desc is not declared"),
        ("mov.b32 %r1, %tid.q;", FIRST, "register %tid.q is not declared"),
        ("bra NOWHERE;", FIRST, "NOWHERE is not declared, in 'bra NOWHERE'"),
        ("bra v;", FIRST, "v is not a label"),
        ("\n\n@%r1 ret;", FIRST + 2, "%r1 is .b32, not a predicate"),
        ("@%p9 ret;", FIRST, "register %p9 is not declared"),
        ("@v ret;", FIRST, "register v is not declared"),
        ("mov.b32 %r1, !%r2;", FIRST, "%r2 is .b32, not a predicate"),
        ("mov.b32 %r1, %r2\n mov.b32 %r2, %r3;", FIRST, "in 'mov.b32 %r1, %r2 mov.b32"),
        ("mov.b32 %r1,, %r2;", FIRST, "an operand is missing"),
        ("mov.b32 %r1, %r2 %r3;", FIRST, "'%r2' is not a constant"),
        ("mov.b32 %r1, 08;", FIRST, "'08' is not a constant"),
        ("mov.b64 %rd1, 0x10000000000000000;", FIRST, "does not fit 64 bits"),
        (f"mov.b64 %rd1, {'9' * 5000};", FIRST, "does not fit 64 bits"),
        ("mov.b32 %r1, 1/0;", FIRST, "divides by zero"),
        ("mov.b32 %r1, 1<<99;", FIRST, "shifts by 99"),
        ("mov.b32 %r1, " + "(" * 5000 + ";", FIRST, "not closed"),
        ("mov.b32 %r1, " + "(" * 5000 + "1" + ")" * 5000 + ";", FIRST, "nested too deeply"),
        ("mov.b32 %r1, " + "-" * 5000 + "1;", FIRST, "nested too deeply"),
        ("ld.shared.b32 %r1, [%r2;", FIRST, "not closed"),
        ("ld.shared.b32 %r1, [%r2, %r3];", FIRST, "is not [address] nor [tensor map"),
        ("ld.shared.b32 %r1, [];", FIRST, "is not a constant"),
        ("ld.shared.b32 %r1, [%tid.x];", FIRST, "%tid.x is no base"),
        ("ld.global.b32 %r1, v[1];", FIRST, "v[1] indexes a variable"),
        ("mov.b64 %rd1, {%r1, {%r2, %r3}};", FIRST, "cannot be an element"),
        ("%r1 = 3;", FIRST, "this is not an instruction, in '%r1 = 3'"),
        ("mov..b32 %r1, 3;", FIRST, "this is not an instruction"),
        ("ret\n", FIRST, "ret is not declared (is a ';' missing?), in 'ret ret'"),
        ("call;", FIRST, "names no function"),
        ("bra;", FIRST, "an operand is missing"),
        ("call (%r1);", FIRST, "names no function"),
        ("call nothing;", FIRST, "nothing is not declared"),
        (".reg .b32 %r3;", FIRST, "%r3 is declared twice in this scope"),
        (".reg .b32 %r<4>;", FIRST, "%r<> is declared twice"),
        (".reg .b33 x;", FIRST, "'.b33' is not expected in a declaration"),
        (".reg x;", FIRST, "a type is missing before 'x'"),
        (".reg .b32 x<y>;", FIRST, "'y' is no number of registers"),
        ("L: exit;\nL: exit;", FIRST + 1, "L is declared twice"),
        (".shared .align 3 .b8 x[4];", FIRST, "'3' is no alignment"),
        (".shared .b8 x[-1];", FIRST, "-1 is no extent"),
        (".foo 3;", FIRST, "'.foo' is no directive that is known here"),
        (".branchtargets A;\nA: ret;", FIRST, "needs a label before it"),
        ("t: .branchtargets v;", FIRST, "v is not a label"),
        (".version 9.0", FIRST, "not expected in a function's body"),
    ],
)
def test_a_wrong_body(parse_kernel, body, line, message):
    with pytest.raises(PtxSyntaxError) as raised:
        parse_kernel(body, module=".global .b32 v[4];")
    assert message in str(raised.value)
    assert str(raised.value).startswith(f"PTX line {line}: ")
    assert raised.value.span.ptx_line == line


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (".entry k {\nret;\n", 4, "body is never closed, in '.entry k'"),
        (".entry k\n", 4, "a function's body or ';' is missing"),
        (".entry k { ret; } }", 4, "not expected outside of a function, in '}'"),
        (".entry k { ret; }\n.entry k { ret; }", 5, "k is defined twice"),
        (".entry k { ret;\n.entry l { ret; }", 5, "a '}' is missing, in '.entry l'"),
        ("\n.entry k .maxthreads 3 { ret; }", 5, "'.maxthreads' is no directive"),
        (".entry k(.param .b32) { ret; }", 4, "expected a name, found ')'"),
        (".entry k(.shared .b32 x) { ret; }", 4, "expected .param, found '.shared'"),
        (".entry (.param .b32 r) k { ret; }", 4, "an .entry returns nothing"),
        (".global .u32 a[2] = {1,2,3};", 4, "more than 2 initial values"),
        (".global .u32 a = 1.5;", 4, "a float initialises .u32"),
        (".global .b8 a[70000000] = {1};", 4, "initialised bytes are too many"),
        (".global .u64 a = nobody;", 1, "nobody, of which a holds the address, is not declared"),
        (".global .u32 a; .global .u32 a;", 4, "a is declared twice"),
        (".global .u32 a b;", 4, "'b' is not expected here"),
        ("/* never\nclosed", 4, "the comment that opens here is never closed"),
        ("mov.b32 a, 1;", 4, "'mov' is no directive that is known here"),
        (".alias f, g;", 4, "'g' is not a function"),
    ],
)
def test_a_wrong_module(parse_text, text, line, message):
    with pytest.raises(PtxSyntaxError) as raised:
        parse_text(text)
    assert message in str(raised.value)
    assert raised.value.span.ptx_line == line


@pytest.mark.parametrize("missing", ["version", "target"])
def test_version_and_target_must_be_there(missing):
    lines = {"version": ".version 9.0\n", "target": ".target sm_90a\n"}
    del lines[missing]
    with pytest.raises(PtxSyntaxError, match=f"no .{missing} directive"):
        parse_module("".join(lines.values()))


def test_an_error_names_the_source_line_and_the_file():
    text = (
        '.version 9.0\n.target sm_90a\n.file 1 "kernel.py"\n'
        ".entry k {\n.loc 1 42 8\nadd.s32 %r1, 1, 2;\n}\n"
    )
    with pytest.raises(PtxSyntaxError) as raised:
        parse_module(text, name="dump/k.ptx")
    assert str(raised.value) == (
        "PTX line 6 (kernel.py:42): dump/k.ptx: register %r1 is not declared, "
        "in 'add.s32 %r1, 1, 2'"
    )
    assert isinstance(raised.value, PtxEmuError)
    assert isinstance(raised.value, ValueError)


def test_a_long_statement_is_shortened(parse_kernel):
    with pytest.raises(PtxSyntaxError) as raised:
        parse_kernel("mov.b32 {" + ", ".join(["%r1"] * 500) + ", %oops}, 1;")
    assert len(str(raised.value)) < 300
    assert "%oops is not declared" in str(raised.value)


# Scopes in braces, labels and line information.

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


def test_inlined_code_of_a_library_is_at_the_users_line(parse_text):
    """sum.cuh, which main.cu inlines, inlines two functions of the toolkit, one in the other."""
    module = parse_text(
        '.file 1 "/home/me/main.cu"\n.file 2 "/home/me/sum.cuh"\n'
        '.file 3 "/usr/local/cuda-13.0/include/cccl/cub/block.cuh"\n'
        '.file 4 "/opt/nvidia/cu13/include/sm_20_atomic_functions.hpp"\n'
        ".entry k {\n.reg .b32 %r<3>;\n.loc 1 7 3\nmov.b32 %r1, 1;\n"
        ".loc 2 20 5, function_name $L0, inlined_at 1 7 3\nmov.b32 %r1, 2;\n"
        ".loc 3 5 9, function_name $L1, inlined_at 2 20 5\nmov.b32 %r1, 3;\n"
        ".loc 4 84 1, function_name $L2+4, inlined_at 3 5 9\nmov.b32 %r1, 4;\n"
        ".loc 4 90 1, function_name $L2, inlined_at 3 6 9\nmov.b32 %r1, 5;\nret;\n}\n"
    )
    spans = [i.span for i in module.functions["k"].instructions]
    assert [(s.source_file[-7:], s.source_line) for s in spans[:4]] == [
        ("main.cu", 7), ("sum.cuh", 20), ("sum.cuh", 20), ("sum.cuh", 20)
    ]  # fmt: skip
    assert [s.library and s.library.rpartition("/")[2] for s in spans[:5]] == [
        None, None, "block.cuh:5", "sm_20_atomic_functions.hpp:84", None
    ]  # fmt: skip
    assert str(spans[3]).endswith("sum.cuh:20, in sm_20_atomic_functions.hpp:84)")
    assert spans[4].source_file.endswith(".hpp") and spans[4].source_line == 90


def test_functions_have_registers_and_labels_of_their_own(parse_text):
    module = parse_text(
        ".entry a { .reg .b32 %r<2>; L: mov.b32 %r1, 1; bra L; }\n"
        ".entry b { .reg .b64 %r<2>; mov.b64 %r1, 1; L: bra L; }"
    )
    a, b = module.functions.values()
    assert (a.registers[0].type, b.registers[0].type) == ("b32", "b64")
    assert (a.labels, b.labels) == ({"L": 0}, {"L": 1})


# A kernel of 20 000 lines, as long as a compiler's largest.

LINES = 20_000


def large_kernel():
    """Lines such as a compiler writes: every operand text about twice, a .loc every eighth."""
    lines = [".version 9.0", ".target sm_100a", ".address_size 64", '.file 1 "k.py"']
    lines += [".entry k()", "{", f".reg .b32 %r<{LINES}>;", f".reg .f32 %f<{LINES}>;"]
    lines += [".reg .pred %p<9>;", ".reg .b64 %rd<9>;"]
    while len(lines) < LINES - 2:
        n = len(lines)
        lines += [
            f"\t.loc\t1 {n} 12",
            f"\tadd.s32 \t%r{n}, %r{n // 2}, {n};",
            f"\tfma.rn.ftz.f32 \t%f{n}, %f{n // 2}, 0f3F{n:06X}, %f{n // 4};",
            f"\tld.shared.v4.b32 \t{{%r{n + 1}, %r{n + 2}, %r{n + 3}, %r{n + 4}}}, [%r{n}+{n}];",
            f"\tsetp.lt.s32 \t%p1, %r{n + 1}, %r{n + 2};",
            f"\t@%p1 bra \t$L__BB0_{n};",
            f"\tmov.b64 \t%rd1, {{%r{n + 3}, %r{n + 4}}};",
            f"$L__BB0_{n}:",
        ]
    return "\n".join([*lines, "ret;", "}"])


@pytest.mark.timeout(30)
def test_twenty_thousand_lines():
    kernel = parse_module(large_kernel()).functions["k"]
    blocks = len(kernel.labels)
    assert blocks > LINES // 8 - 10
    assert len(kernel.instructions) == 6 * blocks + 1
    last = kernel.instructions[-2]
    assert last.span.ptx_line == last.span.source_line + 7
    assert len({r.slot for r in kernel.registers}) == len(kernel.registers)
