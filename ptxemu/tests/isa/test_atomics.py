"""Atomics: what each lane gets back, vectors, reports; values are in `tests.silicon`."""

import numpy as np
import pytest
from tests.kernel_run import TID, load, run, store

from ptxemu.events import AccessKind


@pytest.mark.parametrize(
    ("operation", "type_", "start", "operands", "result", "found"),
    [
        ("add", "u32", 0xFFFFFFFF, [2, 3], 4, [0xFFFFFFFF, 1]),
        ("min", "s32", 4, [0xFFFFFFFF, 3], 0xFFFFFFFF, [4, 0xFFFFFFFF]),
        ("inc", "u32", 1, [2, 2, 2], 1, [1, 2, 0]),
        ("dec", "u32", 1, [5, 5, 3], 3, [1, 0, 5]),
        ("exch", "b32", 9, [1, 2], 2, [9, 1]),
    ],
)
def test_lanes_act_in_lane_order_and_get_what_they_found(
    operation, type_, start, operands, result, found
):
    body = f"""{TID}{load("%r1", "b")} atom.global.{operation}.{type_} %r2, [%rd_x], %r1;
{store("y", "%r2")}"""
    x, b = np.array([start], np.uint32), np.array(operands, np.uint32)
    ran = run(body, block=len(operands), x=x, b=b, y=len(operands))
    assert (ran.x[0], ran.y.tolist()) == (result, found)


@pytest.mark.parametrize(
    "opcode", ["red.relaxed.gpu.global.add.L2::cache_hint.v4.f32 {}, %rd1", "red.add.v4.f32 {}"]
)
def test_a_vector_reduction_adds_its_elements(opcode):
    operands = opcode.format("[%rd_x], {%f1, %f2, %f1, %f2}")
    body = f"mov.b32 %f1, 0f3F800000; mov.b32 %f2, 0f40000000; {operands};"
    ran = run(body, x=np.zeros(4, np.float32))
    np.testing.assert_array_equal(ran.x, [32, 64, 32, 64])


def test_an_atom_is_reported_with_its_order():
    body = "atom.acq_rel.sys.global.add.u32 %r1, [%rd_x], 1; red.global.add.u32 [%rd_x], 1;"
    first, second = run(body, block=2, x=1).seen.accesses
    assert (first.kind, first.order, first.scope) == (AccessKind.ATOMIC, "acq_rel", "sys")
    assert (second.order, second.scope, len(second.starts)) == ("relaxed", "gpu", 2)
