"""Directives of a module, heads of functions, variables and their initial values."""

import struct

import pytest

from ptxemu.syntax.ast import Relocation, Variable
from ptxemu.syntax.parser import parse_module


def one(module):
    (variable,) = module.variables
    return variable


def test_the_header_and_trailing_nuls():
    module = parse_module(
        "// made by hand\n.version 8.8\n.target sm_100a, debug\n.address_size 64\n\0\0\n\0",
        name="x.ptx",
    )
    assert module.version == (8, 8)
    assert module.target == "sm_100a"
    assert module.address_size == 64
    assert module.name == "x.ptx"
    assert not module.functions


def test_comments_pragmas_sections_and_preprocessor_lines_are_read_over(parse_text):
    module = parse_text(
        '/* a\n{ comment */ .entry k // with ; and }\n.pragma "nounroll";\n{\n'
        '# 12 "a.cu"\n.pragma "used_bytes_mask 0xfff"; ret; /**/ }\n'
        ".section .debug_str\n{\n$L__info_string0:\n.b8 95,90,0\n.b64 $L__info_string0+4\n}\n"
        ".section .debug_loc { }\n"
    )
    (instruction,) = module.kernels["k"].instructions
    assert instruction.span.ptx_line == 9


def test_performance_directives(parse_text):
    module = parse_text(
        ".visible .entry k()\n.reqntid 512, 1, 1\n.minnctapersm 1\n.explicitcluster\n"
        '.reqnctapercluster 2,1,1 .maxclusterrank 8 .maxnreg 168 .pragma "a", "b";\n{ ret; }\n'
        ".func f() .noreturn { trap; }\n.entry m .maxntid 128 { ret; }"
    )
    assert module.functions["k"].directives == {
        "reqntid": (512, 1, 1),
        "minnctapersm": (1,),
        "explicitcluster": (),
        "reqnctapercluster": (2, 1, 1),
        "maxclusterrank": (8,),
        "maxnreg": (168,),
    }
    assert module.functions["f"].directives == {"noreturn": ()}
    assert module.functions["m"].directives == {"maxntid": (128,)}
    assert list(module.kernels) == ["k", "m"]


def test_parameters_are_laid_out_in_a_block(parse_kernel):
    kernel = parse_kernel(
        "ld.param.u64 %rd1, [a]; ld.param.b32 %r1, [d+4];",
        parameters=".param .u64 .ptr .global .align 16 a, .param .u8 b,\n"
        ".param .align 64 .b8 c[128], .param .f32 d[2], .param .b64 .ptr .align 1 e, .param .b16 f",
    )
    layout = [(p.name, p.type, p.size, p.align, p.offset) for p in kernel.parameters]
    assert layout == [
        ("a", "u64", 8, 8, 0),
        ("b", "u8", 1, 1, 8),
        ("c", "b8", 128, 64, 64),
        ("d", "f32", 8, 4, 192),
        ("e", "b64", 8, 8, 200),
        ("f", "b16", 2, 2, 208),
    ]


def test_prototypes_definitions_and_aliases(parse_text):
    module = parse_text(
        ".extern .func (.param .b32 func_retval0) vprintf\n(\n.param .b64 a,\n.param .b64 b\n)\n;\n"
        ".func (.param .align 16 .b8 o[16]) f (.param .b32 x);\n"
        ".visible .func (.param .align 16 .b8 o[16]) f (.param .b32 x)\n"
        "{ st.param.b32 [o+4], 1; ret; }\n.func (.param .align 16 .b8 o[16]) f (.param .b32 x);\n"
        ".visible .func g();\n.alias g, f;\n"
    )
    vprintf, f = module.functions["vprintf"], module.functions["f"]
    assert not vprintf.is_entry
    assert vprintf.instructions == ()
    assert [p.offset for p in vprintf.parameters] == [0, 8]
    assert vprintf.returns[0].type == "b32"
    assert len(f.instructions) == 2
    assert (f.returns[0].size, f.returns[0].align) == (16, 16)
    assert module.functions["g"] is f
    assert module.kernels == {}


def test_variables_of_a_module(parse_text):
    module = parse_text(
        ".extern .shared .align 1024 .b8 dyn[];\n"
        ".visible .global .attribute(.managed) .align 16 .u32 g;\n"
        ".weak .const .v4 .f32 v;\n.shared .f64 m[2][3], n;\n"
    )
    assert module.variables == (
        Variable("dyn", "shared", 0, 1024, is_extern=True),
        Variable("g", "global", 4, 16, is_managed=True),
        Variable("v", "const", 16, 16),
        Variable("m", "shared", 48, 8),
        Variable("n", "shared", 8, 8),
    )


def test_variables_of_a_function(parse_kernel):
    kernel = parse_kernel(
        ".local .align 8 .b8 __local_depot0[88]; .shared .b32 s;\n"
        "mov.b64 %rd1, __local_depot0;\n"
        "{ .param .align 4 .b8 p0[8]; .shared .b16 s; mov.b32 %r1, s; st.param.b32 [p0+4], %r1; }",
        module=".global .b32 s;",
    )
    assert kernel.variables == (
        Variable("__local_depot0", "local", 88, 8),
        Variable("s", "shared", 4, 4),
        Variable("p0@1", "param", 8, 4),
        Variable("s@1", "shared", 2, 2),
    )
    assert kernel.instructions[1].operands[1].name == "s@1"
    assert kernel.instructions[2].operands[0].base.name == "p0@1"


@pytest.mark.parametrize(
    ("declaration", "initial"),
    [
        (".global .align 4 .u32 a = 3;", struct.pack("<I", 3)),
        (".global .s32 a = -1;", b"\xff" * 4),
        (".global .b8 a[4] = {104, 0x69, -1};", bytes([104, 105, 255, 0])),
        (".global .u8 a[] = {1, 2, 3};", bytes([1, 2, 3])),
        (".const .f32 a[2] = {1.5, 0f40000000};", struct.pack("<2f", 1.5, 2)),
        (
            ".const .f32 a[3] = {-2.5, -0f40000000, 1e99};",
            struct.pack("<3f", -2.5, -2, float("inf")),
        ),
        (".global .f64 a = -1.5;", struct.pack("<d", -1.5)),
        (".global .f16 a = 1.5;", struct.pack("<e", 1.5)),
        (".global .f32 a = 2;", struct.pack("<f", 2)),
        (".global .b32 a = 0f3f800000;", struct.pack("<f", 1)),
        (".global .b64 a = 0d3ff0000000000000;", struct.pack("<d", 1)),
        (".global .f32 a = 0f7f800001;", struct.pack("<I", 0x7F800001)),
        (".global .v2 .u16 a = {1, 2};", struct.pack("<2H", 1, 2)),
        (".global .b16 a[2][3] = {{1, 2}, {4, 5, 6}};", struct.pack("<6H", 1, 2, 0, 4, 5, 6)),
        (".global .b16 a[][2] = {{1, 2}, {3}};", struct.pack("<4H", 1, 2, 3, 0)),
        (".global .b16 a[2][2] = {1, 2, 3, 4};", struct.pack("<4H", 1, 2, 3, 4)),
        (".global .b32 a[2] = {1<<4, WARP_SZ-1};", struct.pack("<2I", 16, 31)),
    ],
)
def test_initial_values(parse_text, declaration, initial):
    variable = one(parse_text(declaration))
    assert variable.initial == initial
    assert variable.size == len(initial)
    assert variable.relocations == ()


def test_initial_values_that_are_addresses(parse_text):
    module = parse_text(
        ".global .b8 $str[3] = {97, 98};\n"
        ".global .u64 p[4] = {generic($str), $str+4, 7, generic($str)+8};\n"
        ".global .b8 q[2] = {0xff($str), 0xff00($str)};\n"
    )
    _, p, q = module.variables
    assert p.initial == bytes(16) + struct.pack("<Q", 7) + bytes(8)
    assert p.relocations == (
        Relocation(0, 8, "$str", is_generic=True),
        Relocation(8, 8, "$str", addend=4),
        Relocation(24, 8, "$str", addend=8, is_generic=True),
    )
    assert q.relocations == (Relocation(0, 1, "$str"), Relocation(1, 1, "$str", shift=8))


def test_blanks_between_directives_may_be_left_out(parse_text):
    module = parse_text(".visible.entry k(.param.b32 a){.reg.b32 %r<2>;ld.param.b32 %r1,[a];}")
    assert module.kernels["k"].registers[0].name == "%r1"


def test_registers_of_every_kind(parse_kernel):
    kernel = parse_kernel(
        ".reg .b32 a, b<2>, %c1<3>; .reg .f16x2\t%hh;\n"
        "mov.b32 a, b1; mov.b32 a, %c12; mov.b32 a, %hh;"
    )
    assert [(r.name, r.type) for r in kernel.registers] == [
        ("a", "b32"),
        ("b1", "b32"),
        ("%c12", "b32"),
        ("%hh", "f16x2"),
    ]
