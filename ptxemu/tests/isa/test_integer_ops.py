"""Operands, masks and guards of integer arithmetic; values are in `tests.silicon`."""

import numpy as np
from tests.isa.pure_run import apply, run


def test_constants_and_negative_constants_are_operands():
    a = np.arange(32, dtype=np.uint32)
    assert apply("add.s32", np.int32, a, constants=(-5,)).tolist() == list(range(-5, 27))
    assert apply("mul.wide.s32", np.int64, a, constants=(-3,)).tolist() == [
        -3 * x for x in range(32)
    ]
    assert apply("max.u32", np.uint32, a, constants=(20,)).tolist() == [
        max(x, 20) for x in range(32)
    ]


def test_only_lanes_of_the_mask_are_written_and_guards_hold_within_it():
    a = np.arange(32, dtype=np.uint32)
    old = np.full(32, 1000, np.uint32)
    mask = a < 20
    body = "add.u32 %d, %a, 1; @%p add.u32 %d, %d, 100; @!%p add.u32 %e, %d, 5;"
    found, guarded = run(
        body, {"d": np.uint32, "e": np.uint32}, mask=mask, a=a, d=old, e=old, p=a % 2 == 0
    )
    for lane in range(32):
        new = lane + 1 + (100 if lane % 2 == 0 else 0)
        assert found[lane] == (new if lane < 20 else 1000)
        assert guarded[lane] == (new + 5 if lane < 20 and lane % 2 else 1000)
