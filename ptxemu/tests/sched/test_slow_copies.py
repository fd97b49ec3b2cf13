"""Policy("slow"): products come before copies, and copies come in the order of their issue."""

from types import SimpleNamespace

import numpy as np
from tests.kernel_run import TID, source

from ptxemu import api
from ptxemu.sched.policy import Policy
from ptxemu.sched.scheduler import Scheduler

TWO_COPIES = f"""
{TID} setp.ne.u32 %p0, %r0, 0; @%p0 bra END; mov.u32 %r1, smem; add.u32 %r2, %r1, 16;
add.u32 %r3, %r1, 128; mbarrier.init.shared.b64 [%r1], 1; mbarrier.init.shared.b64 [%r1+8], 1;
fence.mbarrier_init.release.cluster; mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 64;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd_x], 64, [%r1];
add.u32 %r4, %r1, 8; mbarrier.arrive.expect_tx.shared.b64 _, [%r1+8], 64;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd_x], 64, [%r4];
WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%r1+8], 0; @!%p1 bra WAIT;
mbarrier.test_wait.parity.shared.b64 %p2, [%r1], 0; selp.u32 %r5, 1, 0, %p2;
st.global.u32 [%rd_out], %r5;
END:
"""


def first_copy_was_done(asynchronous: str, seed: int) -> bool:
    """Whether the first copy was done when the second was waited for."""
    out, x = np.zeros(1, np.uint32), np.arange(64, dtype=np.uint32)
    module = api.load(source(TWO_COPIES, {"x": x, "out": out}, shared=256))
    module.launch("k", 1, 32, args=[x, out], policy=Policy(asynchronous, seed=seed))
    return bool(out[0])


def test_copies_come_in_the_order_of_their_issue() -> None:
    assert all(first_copy_was_done("slow", seed) for seed in range(8))
    assert not all(first_copy_was_done("late", seed) for seed in range(8))


def test_products_come_before_copies_that_were_issued_earlier() -> None:
    kinds = ["cp.async.bulk.tensor", "wgmma", "cp.async", "tcgen05.mma"]
    ready = [SimpleNamespace(kind=kind) for kind in kinds]
    pending = SimpleNamespace(ready=ready)
    machine = SimpleNamespace(pending=pending, take_step=lambda operation: ready.remove(operation))
    scheduler = SimpleNamespace(_machine=machine, _policy=Policy("slow"))
    left = []
    while Scheduler._step_async(scheduler):
        left.append([operation.kind for operation in ready])
    assert left == [[kinds[0], *kinds[2:]], [kinds[0], kinds[2]], [kinds[2]], []]
