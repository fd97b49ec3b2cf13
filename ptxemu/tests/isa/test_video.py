"""Video instructions: the manual's pseudocode on a few chosen numbers."""

import numpy as np
import pytest
from tests.isa.pure_run import apply


def one(opcode, *operands):
    lanes = [np.full(32, operand & 0xFFFFFFFF, np.uint32) for operand in operands]
    found = set(apply(opcode, np.uint32, *lanes).tolist())
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize(
    ("opcode", "operands", "expected"),
    [
        ("vadd.s32.u32.s32", (0xFFFFFFFF, -1), 0xFFFFFFFE),
        ("vadd.s32.u32.s32.sat", (0xFFFFFFFF, -1), 0x7FFFFFFF),
        ("vadd.u32.s32.s32.sat", (-3, 1), 0),
        ("vsub.s32.s32.u32.sat", (-(2**31), 5), 0x80000000),
        ("vabsdiff.u32.s32.s32", (-3, 4), 7),
        ("vabsdiff.u32.s32.s32.add", (-3, 4, 10), 17),
        ("vmin.s32.s32.u32", (-3, 0xFFFFFFFF), 0xFFFFFFFD),
        ("vmax.u32.s32.u32", (-3, 0xFFFFFFFF), 0xFFFFFFFF),
        ("vmax.s32.s32.s32.min", (-3, 4, -7), 0xFFFFFFF9),
        ("vshl.u32.u32.u32.clamp", (3, 40), 0),
        ("vshl.u32.u32.u32.wrap", (3, 33), 6),
        ("vshl.u32.u32.u32.sat.clamp", (3, 40), 0xFFFFFFFF),
        ("vshr.s32.s32.u32.clamp", (-8, 40), 0xFFFFFFFF),
        ("vshr.u32.u32.u32.wrap.add", (8, 33, 1), 5),
        ("vset.s32.u32.lt", (-1, 0), 1),
        ("vset.u32.u32.lt.add", (-1, 0, 5), 5),
        ("vmad.u32.u32.u32", (3, 4, 5), 17),
        ("vmad.s32.s32.s32.sat", (2**31 - 1, 2, 0), 0x7FFFFFFF),
        ("vmad.u32.u32.u32.shr15", (2**20, 2**10, 0), 2**15),
        ("vmad.u32.u32.u32.po", (3, 4, 5), 18),
        ("vadd4.u32.u32.u32", (0xFF010203, 0x01010101, 0), 0x00020304),
        ("vadd4.u32.u32.u32.sat", (0xFF010203, 0x01010101, 0), 0xFF020304),
        ("vsub4.s32.s32.s32.sat", (0x80000000, 0x01000000, 0), 0x80000000),
        ("vavrg4.u32.u32.u32", (0x00FF0103, 0x02FF0204, 0), 0x01FF0204),
        ("vavrg2.s32.s32.s32", (0x0000FFFF, 0x0000FFFE, 0), 0x0000FFFE),
        ("vabsdiff4.u32.u32.u32", (0x10203040, 0x40302010, 0), 0x30101030),
        ("vabsdiff4.u32.u32.u32.add", (0x10203040, 0x40302010, 1), 0x81),
        ("vmin2.s32.s32.s32", (0x0001FFFF, 0x00020000, 0), 0x0001FFFF),
        ("vmax2.u32.u32.u32", (0x0001FFFF, 0x00020000, 0), 0x0002FFFF),
        ("vset4.u32.u32.eq", (0x01020304, 0x01000300, 0), 0x01000100),
        ("vset2.s32.s32.lt.add", (0xFFFFFFFF, 0, 7), 9),
    ],
)
def test_results(opcode, operands, expected):
    assert one(opcode, *operands) == expected
