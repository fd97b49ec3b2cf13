"""Whatever the text, the parser answers with a module or with a PtxSyntaxError, and soon."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxemu.errors import PtxSyntaxError
from ptxemu.syntax.ast import Module
from ptxemu.syntax.parser import parse_module

PROGRAM = """// made by hand
.version 9.0
.target sm_90a
.address_size 64
.file 1 "a/b.py"
.extern .func (.param .b32 out) vprintf(.param .b64 a, .param .b64 b);
.global .align 1 .b8 text[5] = {104, 105, 0x20, 0};
.global .align 8 .u64 names[2] = {generic(text), text+4};
.const .f32 table[2][2] = {{1.5, 0f40000000}, {-2.0}};
.extern .shared .align 1024 .b8 dyn[];
.visible .entry k(.param .u64 .ptr .global .align 16 x, .param .align 64 .b8 map[128])
.reqntid 64, 1, 1
.minnctapersm 1
{
\t.reg .pred \t%p<4>; .reg .b32 \t%r<9>, t; .reg .b64 %rd<5>; .reg .v2 .f32 v;
\t.shared .align 8 .b8 bar[16];
\t.loc 1 12 4
\tld.param.b64 \t%rd1, [x];
\tmov.u32 %r1, %tid.x;
\tmov.b32 %r2, dyn;
\tadd.s32 %r3, %r2, (3 + 4) * 8;
\telect.sync _|%p1, -1;
\t@!%p1 bra \t$L__BB0_1;
\tcp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
\t\t[%r2], [%rd1, {%r1, 0}], [%r3];
$L__BB0_1:
\t{
\t.reg .pred P1;
\tLAB_WAIT: mbarrier.try_wait.parity.shared::cta.b64 P1, [bar+8], 0x0;
\t@P1 bra DONE;
\tbra LAB_WAIT;
\tDONE:
\t}
\tld.shared.v2.f32 v, [%r2+-8]; mov.b64 {%r4, _}, %rd1; /* two
\tlines */ setp.lt.f32 %p2|%p3, v.x, 1.25e1;
\t{ .param .b64 p0; .param .b32 r0; st.param.b64 [p0+0], %rd1;
\tcall.uni (r0), vprintf, (p0, p0); ld.param.b32 t, [r0]; }
\tts: .branchtargets $L__BB0_1, END;
\tbrx.idx %r1, ts;
END:\tret;
}
"""
TOKENS = sorted(set(re.findall(r"[\w.$%:]+|\S|\n", PROGRAM)) | set("\0\"'/*#~?\\é²٣"))


def outcome(text):
    """Parse; anything but a module or a PtxSyntaxError is a failure of the test."""
    try:
        assert isinstance(parse_module(text), Module)
    except PtxSyntaxError as error:
        assert str(error).startswith("PTX line ")
        return error
    return None


def test_the_program_itself_is_right():
    assert outcome(PROGRAM) is None


positions = st.integers(0, len(PROGRAM))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(positions, st.integers(0, 12), st.sampled_from(TOKENS)), max_size=4))
def test_text_with_pieces_replaced(edits):
    text = PROGRAM
    for at, length, token in edits:
        text = text[:at] + token + text[at + length :]
    outcome(text)


@settings(max_examples=100, deadline=None)
@given(positions, positions, positions)
def test_text_with_a_piece_moved(start, end, to):
    piece = PROGRAM[start:end]
    rest = PROGRAM[:start] + PROGRAM[max(start, end) :]
    outcome(rest[:to] + piece + rest[to:])


@settings(max_examples=100, deadline=None)
@given(positions)
def test_text_that_breaks_off(end):
    outcome(PROGRAM[:end])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(TOKENS), max_size=12).map(" ".join))
def test_a_body_of_random_tokens(body):
    outcome(f".version 9.0 .target sm_90a .entry k {{ .reg .b32 %r<9>; {body} ; }}")


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=40))
def test_a_body_of_random_characters(body):
    outcome(f".version 9.0\n.target sm_90a\n.entry k {{ .reg .b32 %r<9>; add.s32 %r1, {body} ; }}")


def combined(inner):
    """Larger expressions of smaller ones, with operators that C and Python share."""
    operators = st.sampled_from(["+", "-", "*", "&", "|", "^", "<<", ">>", "<", ">=", "=="])
    return st.one_of(
        st.tuples(inner, operators, inner).map(lambda t: f"({' '.join(t)})"),
        inner.map(lambda text: f"(-{text})"),
        inner.map(lambda text: f"(~{text})"),
    )


@settings(max_examples=100, deadline=None)
@given(st.recursive(st.integers(0, 99).map(str), combined, max_leaves=6))
def test_a_constant_expression_means_what_it_means_in_python(expression):
    text = f".version 9.0\n.target sm_90a\n.entry k {{ .reg .b64 a; mov.b64 a, {expression}; }}"
    try:
        found = parse_module(text).functions["k"].instructions[0].operands[1].value
    except PtxSyntaxError as error:
        assert "64 bits" in str(error) or "shifts by" in str(error)
    else:
        assert found == eval(expression)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("piece", ["[", "{", "(", "a", "%r1,", "@", "\n", ":", ".", '"', "/*"])
def test_no_text_takes_quadratic_time(piece):
    outcome(f".version 9.0\n.target sm_90a\n.entry k {{ {piece * 100_000} ;")
    outcome(f".version 9.0\n.target sm_90a\n.entry k {{ mov.b32 {piece * 100_000}; }}")
    outcome(f".version 9.0\n.target sm_90a\n.entry k (.param .b32 {piece * 100_000}; }}")


@pytest.mark.parametrize("depth", [10, 10_000])
def test_scopes_may_nest_deeply(depth):
    text = ".version 9.0\n.target sm_90a\n.entry k {" + "{" * depth + "ret;" + "}" * depth + "}"
    assert outcome(text) is None
