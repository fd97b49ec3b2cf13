"""What is no PTX is refused with the line and the text that is wrong."""

import pytest

from ptxemu.errors import PtxEmuError, PtxSyntaxError
from ptxemu.syntax.parser import parse_module

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
