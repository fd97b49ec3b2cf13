"""Policy.lanes_apart: lanes of a warp are ordered by what waits for them, and by nothing else."""

import numpy as np
import pytest
from tests.kernel_run import TID, setup, source

from ptxemu import api
from ptxemu.mutate import Replay, mutate
from ptxemu.sched.policy import Policy

EXCHANGE = f"""
{TID} shl.b32 %r1, %r0, 2;
mov.u32 %r2, smem;
add.u32 %r3, %r2, %r1;
mov.u32 %r6, 0;
ROUND:
add.u32 %r4, %r0, %r6;
st.shared.u32 [%r3], %r4;
{{sync}}
xor.b32 %r5, %r1, 124;
add.u32 %r5, %r2, %r5;
ld.shared.u32 %r7, [%r5];
{{sync}}
add.u32 %r8, %r8, %r7;
add.u32 %r6, %r6, 1;
setp.lt.u32 %p0, %r6, 20;
@%p0 bra ROUND;
mul.wide.u32 %rd0, %r1, 1;
add.u64 %rd0, %rd_out, %rd0;
st.global.u32 [%rd0], %r8;
"""
"""Twenty times each lane takes what the lane opposite to it has left in shared memory."""
WANTED = 20 * (31 - np.arange(32)) + sum(range(20))


def exchanged(sync: str, policy: Policy) -> np.ndarray:
    out = np.zeros(32, np.uint32)
    text = source(EXCHANGE.format(sync=sync), {"out": out}, shared=128)
    api.load(text).launch("k", 1, 32, args=[out], policy=policy)
    return out


@pytest.mark.parametrize("sync", ["bar.warp.sync -1;", "shfl.sync.idx.b32 %r9, %r0, 0, 31, -1;"])
def test_lanes_meet_where_an_instruction_waits_for_them(sync: str) -> None:
    for seed in range(3):
        assert np.array_equal(exchanged(sync, Policy(seed=seed, lanes_apart=0.2)), WANTED)


def test_without_one_lanes_see_what_others_have_not_yet_written() -> None:
    assert np.array_equal(exchanged("", Policy()), WANTED)
    assert not np.array_equal(exchanged("", Policy(lanes_apart=0.2)), WANTED)


def test_the_same_seed_parts_the_same_lanes() -> None:
    policy = Policy(seed=3, lanes_apart=0.2)
    assert np.array_equal(exchanged("", policy), exchanged("", policy))


def test_mutants_of_warp_syncs_are_tried_where_lanes_go_apart() -> None:
    text = source(EXCHANGE.format(sync="bar.warp.sync -1;"), {"out": None}, shared=128)
    arrays = (np.zeros(32, np.uint32),)
    subject = Replay(setup(text, arrays, block=32))
    assert mutate(subject, policies=[Policy()])[1] == []
    _, results = mutate(subject, policies=[Policy(lanes_apart=0.2)])
    assert [(r.mutation.site.name, r.verdict) for r in results] == [
        ("warp-sync#1", "caught"),
        ("warp-sync#2", "caught"),
    ]
