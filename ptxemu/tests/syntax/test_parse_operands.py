"""Every form of operand and of guard."""

import pytest

from ptxemu.syntax.ast import (
    Address,
    FloatImmediate,
    Guard,
    IntImmediate,
    NegatedRegister,
    Pair,
    Register,
    Sink,
    SpecialRegister,
    Symbol,
    Vector,
)

DOUBLE_1_5 = 0x3FF8000000000000


def names(elements):
    return [element.name for element in elements]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("-7", -7),
        ("0x1F", 31),
        ("0XffffffffU", 0xFFFFFFFF),
        ("-0x80", -128),
        ("017", 15),
        ("18446744073709551615", 2**64 - 1),
        ("(1 << 3) + 2 * WARP_SZ", 72),
        ("-3-4", -7),
        ("~0", -1),
        ("!0", 1),
        ("7 % 4 ^ 8", 11),
        ("-7 / 2", -3),
        ("3 >= 2 ? 5 : 6", 5),
        ("1 && 0 || 1", 1),
        ("(.u64)-1", 2**64 - 1),
        ("(.s64)0xffffffffffffffff", -1),
    ],
)
def test_an_integer_constant(operands, text, value):
    assert operands(f"mov.b64 %rd1, {text};")[1] == IntImmediate(value)


@pytest.mark.parametrize(
    ("text", "bits", "width"),
    [
        ("0f3F800000", 0x3F800000, 32),
        ("0Fbf800000", 0xBF800000, 32),
        ("0d3ff0000000000000", 0x3FF0000000000000, 64),
        ("-0f3f800000", 0xBF800000, 32),
        ("1.5", DOUBLE_1_5, 64),
        ("-1.5", DOUBLE_1_5 | 1 << 63, 64),
        (".5", 0x3FE0000000000000, 64),
        ("1.", 0x3FF0000000000000, 64),
        ("15e-1", DOUBLE_1_5, 64),
        ("1.5E0", DOUBLE_1_5, 64),
    ],
)
def test_a_float_constant(operands, text, bits, width):
    assert operands(f"mov.f64 %fd1, {text};")[1] == FloatImmediate(bits, width)


def test_registers_have_types_and_dense_slots(parse_kernel):
    kernel = parse_kernel("add.s32 %r7, %r3, %r7;\nmov.f32 %f1, %f1;\n@%p2 mov.b64 %rd9, %rd0;")
    assert kernel.instructions[0].operands == (
        Register("%r7", 0, "b32"),
        Register("%r3", 1, "b32"),
        Register("%r7", 0, "b32"),
    )
    assert names(kernel.registers) == ["%r7", "%r3", "%f1", "%p2", "%rd9", "%rd0"]
    assert [r.slot for r in kernel.registers] == [0, 1, 2, 3, 4, 5]
    assert [r.type for r in kernel.registers] == ["b32", "b32", "f32", "pred", "b64", "b64"]


@pytest.mark.parametrize(
    "name", ["%tid", "%nctaid.z", "%cluster_ctarank", "%clock64", "%envreg3", "%pm7_64"]
)
def test_special_registers(operands, name):
    assert operands(f"mov.u32 %r1, {name};")[1] == SpecialRegister(name)


def test_a_declared_register_hides_a_special_one(operands):
    assert operands(".reg .b32 %laneid;\nmov.b32 %r1, %laneid;")[1] == Register("%laneid", 1, "b32")


def test_guards(parse_kernel):
    kernel = parse_kernel("@%p1 exit;\n@!%p1 exit;\n@! %p1\n exit; exit;")
    predicate = Register("%p1", 0, "pred")
    guards = [instruction.guard for instruction in kernel.instructions[:4]]
    assert guards == [Guard(predicate, False), Guard(predicate, True), Guard(predicate, True), None]
    assert [i.text for i in kernel.instructions[:4]] == ["exit"] * 4


def test_vectors_and_sinks(operands):
    vector, address = operands("ld.shared.v4.b32 {%r1, _,%r2 ,_}, [%r3];")
    assert isinstance(vector, Vector)
    assert vector.elements[1] == Sink() == vector.elements[3]
    assert names((vector.elements[0], vector.elements[2])) == ["%r1", "%r2"]
    assert address == Address(Register("%r3", 2, "b32"))
    assert operands("st.shared.v2.b32 [%r1], {1, -2};")[1] == Vector(
        (IntImmediate(1), IntImmediate(-2))
    )
    assert isinstance(operands("mov.b128 %q1, {%rd1, %rd2};")[1], Vector)


def test_pairs_and_negated_predicates(operands):
    pair, _, _, negated = operands("setp.eq.and.s32 %p1|%p2, %r1, %r2, !%p3;")
    assert isinstance(pair, Pair)
    assert names((pair.first, pair.second)) == ["%p1", "%p2"]
    assert isinstance(negated, NegatedRegister)
    assert negated.register.name == "%p3"
    assert operands("elect.sync _|%p1, -1;")[0] == Pair(Sink(), Register("%p1", 0, "pred"))
    assert operands("shfl.sync.idx.b32 %r1 | %p1, %r2, 0, 31, -1;")[0].second.name == "%p1"


@pytest.mark.parametrize(
    ("text", "offset"),
    [
        ("%r1", 0),
        ("%r1 + 8", 8),
        ("%r1+-8", -8),
        ("%r1-8+4", -4),
        ("%r1+0x10", 16),
        ("%r1+4*(2+1)", 12),
    ],
)
def test_an_address_in_a_register(operands, text, offset):
    found = operands(f"ld.shared.b32 %r1, [{text}];")[1]
    assert found == Address(Register("%r1", 0, "b32"), offset)


def test_addresses_of_symbols_and_numbers(operands):
    module = ".global .b32 a[4];"
    assert operands("ld.global.b32 %r1, [a];", module)[1] == Address(Symbol("a"))
    assert operands("ld.global.b32 %r1, [a+4];", module)[1] == Address(Symbol("a"), 4)
    assert operands("ld.local.b32 %r1, [16];")[1] == Address(IntImmediate(16))
    assert operands("ld.local.b32 %r1, [0x10+4];")[1] == Address(IntImmediate(20))
    assert operands("mov.b64 %rd1, a;", module)[1] == Symbol("a")
    assert operands("mov.b64 %rd1, a+8;", module)[1] == Symbol("a", 8)


def test_a_tensor_address_and_what_follows(operands):
    opcode = "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
    found = operands(
        f"{opcode}.multicast::cluster.L2::cache_hint\n"
        " [%r1], [%rd1, {%r2, 0,-3}],\n [%r5], {%h1}, %h2, %rd2;"
    )
    assert len(found) == 6
    assert found[1].base.name == "%rd1"
    assert found[1].coordinates[0].name == "%r2"
    assert found[1].coordinates[1:] == (IntImmediate(0), IntImmediate(-3))
    assert found[2].coordinates is None
    assert names(found[3].elements) == ["%h1"]


def test_vector_registers(parse_kernel):
    kernel = parse_kernel(
        ".reg .v4 .f32 v; .reg .v2 .b32 %w<3>;\n"
        "ld.shared.v4.f32 v, [%r1]; mov.f32 %f1, v.y; mov.f32 %f2, v.a; mov.b32 %r2, %w1.y;"
    )
    load, second, fourth, other = (i.operands for i in kernel.instructions[:4])
    assert names(load[0].elements) == ["v.x", "v.y", "v.z", "v.w"]
    assert second[1] is load[0].elements[1]
    assert fourth[1] is load[0].elements[3]
    assert other[1].name == "%w1.y"


def test_calls_have_three_operands_and_the_prototype(parse_kernel):
    module = (
        ".func (.param .b32 out) f (.param .b32 in, .param .b64 more);\n.func g;\n"
        ".func (.reg .u32 o) h (.reg .u32 a) { add.u32 o, a, 1; ret; }\n"
    )
    kernel = parse_kernel(
        "{ .param .b32 p0; .param .b64 p1; .param .b32 r0;\n"
        "call.uni (r0),\nf,\n(\np0,\np1\n);\n"
        "proto : .callprototype (.param .b32 _) _ (.param .b32 _, .param .b64 _);\n"
        "call (r0), %rd1, (p0, p1), proto; }\n"
        "call g; call g, (); call (%r1), h, (3);",
        module,
    )
    calls = [i.operands for i in kernel.instructions if i.modifiers[0] == "call"]
    arguments = Vector((Symbol("p0@1"), Symbol("p1@1")))
    assert calls[0] == (Vector((Symbol("r0@1"),)), Symbol("f"), arguments)
    assert calls[1][1:] == (Register("%rd1", 0, "b64"), arguments, Symbol("proto@1"))
    assert calls[2] == calls[3] == (Vector(()), Symbol("g"), Vector(()))
    assert calls[4] == (
        Vector((Register("%r1", 1, "b32"),)),
        Symbol("h"),
        Vector((IntImmediate(3),)),
    )
    prototype = kernel.prototypes["proto@1"]
    assert [p.type for p in prototype.returns] == ["b32"]
    assert [(p.type, p.offset) for p in prototype.parameters] == [("b32", 0), ("b64", 8)]
    assert "proto@1" not in kernel.labels


def test_opcodes_and_the_text_as_one_line(parse_kernel):
    kernel = parse_kernel(
        "@%p1 ld.shared::cta.v2.b32\n\t{%r1,\n %r2},   [%r3]; mov .b32 %r1,1; bar.sync 0; ret;"
    )
    load, move, barrier, back = kernel.instructions[:4]
    assert load.opcode == "ld.shared::cta.v2.b32"
    assert load.modifiers == ("ld", "shared::cta", "v2", "b32")
    assert load.text == "ld.shared::cta.v2.b32 {%r1, %r2}, [%r3]"
    assert move.opcode == "mov.b32"
    assert barrier.operands == (IntImmediate(0),)
    assert back.operands == ()
    assert [i.pc for i in kernel.instructions] == [0, 1, 2, 3, 4]
