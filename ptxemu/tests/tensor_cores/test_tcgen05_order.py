"""The order of tcgen05 operations: what the ISA pipelines is kept, the rest may go either way."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.tensor_cores import mma_run
from tests.tensor_cores import tensor_core_run as run
from tests.tensor_cores.mma_run import Case

from ptxemu.errors import ExecutionError
from ptxemu.events import FenceKind
from ptxemu.sched.policy import Policy

SMALL, LARGE = Case(128, 16).descriptor.encode(), Case(128, 32).descriptor.encode()
ONES, TWOS = run.DATA, run.DATA + 32 * 1024
MMA = "tcgen05.mma.cta_group::1.kind::f16"


def fill(cta: Any) -> None:
    """Matrices of ones, and of twos."""
    words = cta.shared[run.DATA :].view(np.uint16)
    words[: 16 * 1024] = run.bf16(np.ones(1))[0]
    words[16 * 1024 :] = run.bf16(np.full(1, 2.0))[0]


def desc(at: int) -> int:
    """A K-major matrix at `at`."""
    return mma_run.desc(run.Placed(at, 16, 1024, "128B", 0))


PREPARE = f"""mov.b32 %r6, 0; mov.b32 %r7, {SMALL}; mov.b32 %r8, {LARGE}; mov.b32 %r9, 256;
  mov.b64 %rd0, {desc(ONES)}; mov.b64 %rd1, {desc(TWOS)}; mov.pred %p3, 0; mov.pred %p4, -1;"""


def policies() -> Iterator[Policy]:
    """Schedules that try both orders of what is unordered."""
    for seed in range(12):
        yield Policy(asynchronous="late", seed=seed)


def outcomes(issue: str, lane: int = 0, column: int = 0, **options: Any) -> set[float]:
    """The numbers that a cell of TMEM ends up with."""
    text = mma_run.program(PREPARE + issue, **options)
    found = set()
    for policy in policies():
        recorder = run.launch(text, fill=fill, policy=policy)
        found.add(float(recorder.ctas[0].tmem[lane, column].view(np.float32)))
    return found


OVERWRITE = f"{MMA} [%r6], %rd0, %rd0, %r7, %p3;"
ACCUMULATE = f"{MMA} [%r6], %rd1, %rd1, %r7, %p4;"


def test_products_on_one_accumulator_are_ordered() -> None:
    assert outcomes(OVERWRITE + ACCUMULATE) == {16 + 64}


def test_products_of_different_shape_are_not_ordered() -> None:
    larger = f"{MMA} [%r6], %rd1, %rd1, %r8, %p4;"
    assert outcomes(OVERWRITE + larger) == {80, 16}


def test_products_of_different_kind_are_not_ordered() -> None:
    other = Case(128, 16, "tf32", "f32", "tf32", "tf32").descriptor.encode()
    tf32 = "tcgen05.mma.cta_group::1.kind::tf32 [%r6], %rd1, %rd1, %r10, %p4;"
    issue = f"mov.b32 %r10, {other}; {OVERWRITE} {tf32}"
    assert len(outcomes(issue)) == 2


def test_a_copy_comes_before_a_product_behind_it() -> None:
    """cp -> mma: A in TMEM comes from the copy."""
    source = mma_run.desc(run.Placed(TWOS, 16, 256, "32B", 0))
    issue = f"""mov.b64 %rd2, {source}; tcgen05.cp.cta_group::1.128x256b [%r9], %rd2;
      {MMA} [%r6], [%r9], %rd0, %r7, %p3;"""
    assert outcomes(issue) == {32}


def test_a_copy_over_the_operand_of_a_product_comes_behind_it() -> None:
    """Not by the ISA, but in practice: kernels copy scale factors over those in use."""
    source = mma_run.desc(run.Placed(TWOS, 16, 256, "32B", 0))
    issue = f"""mov.b64 %rd2, {source}; {MMA} [%r6], [%r9], %rd0, %r7, %p3;
      tcgen05.cp.cta_group::1.128x256b [%r9], %rd2;"""
    assert outcomes(issue) == {0}


def test_a_shift_comes_between_products() -> None:
    """mma -> shift -> mma on the shifted rows as A."""
    issue = f"""mov.b32 %r10, 0; {OVERWRITE} tcgen05.shift.cta_group::1.down [%r6];"""
    text = mma_run.program(PREPARE + issue)
    for policy in policies():
        recorder = run.launch(text, fill=fill, policy=policy)
        kinds = [op.kind for op in recorder.issued]
        shift = recorder.issued[kinds.index("tcgen05.shift")]
        assert [op.kind for op in shift.ordering.after] == ["tcgen05.mma"]
        assert recorder.ctas[0].tmem[1, 0].view(np.float32) == 16


def test_a_commit_waits_for_everything_before_it() -> None:
    late = Policy(asynchronous="late", seed=1)
    source = mma_run.desc(run.Placed(TWOS, 16, 256, "32B", 0))
    other = f"mov.b64 %rd2, {source}; tcgen05.cp.cta_group::1.128x256b [%r9], %rd2;"
    text = mma_run.program(PREPARE + OVERWRITE + other)
    recorder = run.launch(text, fill=fill, policy=late)
    commit = recorder.issued[-1]
    assert commit.kind == "tcgen05.commit"
    assert [op.kind for op in commit.ordering.after] == ["tcgen05.mma", "tcgen05.cp"]
    assert recorder.complaints == []


def test_a_second_commit_is_ordered_behind_the_first() -> None:
    again = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%r1];"
    text = mma_run.program(PREPARE + OVERWRITE + again).replace("[%r1], 1;", "[%r1], 2;")
    recorder = run.launch(text, fill=fill)
    first, second = [op for op in recorder.issued if op.kind == "tcgen05.commit"]
    assert second.ordering.after == [first]


def test_a_commit_without_operations_arrives() -> None:
    recorder = run.launch(mma_run.program(""))
    assert recorder.complaints == []


def test_commit_multicast_arrives_in_the_ctas_of_the_mask() -> None:
    """The wait of both CTAs is in the program; a mask without one of them would deadlock."""
    recorder = run.launch(mma_run.program("", group=2), cluster=2)
    (commit,) = [op for op in recorder.issued if op.kind == "tcgen05.commit"]
    assert [cta for cta, _ in commit.mbarriers] == [0, 1]


def test_two_threads_are_ordered_only_through_fences() -> None:
    """Thread 0 overwrites, thread 1 of the other warp accumulates on the same D."""
    text = """
.visible .entry k()
{
  .reg .b32 %r<16>; .reg .b64 %rd<4>; .reg .pred %p<6>; .shared .align 4 .b32 hold;
  mov.u32 %r0, hold; mov.u32 %r2, %tid.x;
  setp.ge.u32 %p0, %r2, 32; setp.eq.u32 %p1, %r2, 0; setp.eq.u32 %p2, %r2, 32;
  PREPARE
  @%p0 bra SECOND; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0], 512;
  @%p1 FIRST_MMA
  BEFORE
  bar.sync 1; bar.sync 2; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r6, 512; ret;
SECOND: bar.sync 1;
  AFTER
  @%p2 SECOND_MMA
  bar.sync 2; ret;
}
"""
    text = text.replace("PREPARE", PREPARE).replace("FIRST_MMA", OVERWRITE)
    text = text.replace("SECOND_MMA", ACCUMULATE)
    for fenced, expected in ((False, {16.0, 80.0}), (True, {80.0})):
        before = "tcgen05.fence::before_thread_sync;" if fenced else ""
        after = "tcgen05.fence::after_thread_sync;" if fenced else ""
        found, hints = set(), set()
        for policy in policies():
            body = text.replace("BEFORE", before).replace("AFTER", after)
            recorder = run.launch(body, warps=2, fill=fill, policy=policy)
            found.add(float(recorder.ctas[0].tmem[0, 0].view(np.float32)))
            second = recorder.issued[-1]
            assert second.ordering.after == []
            hints.add(len(second.ordering.if_synced))
        assert (found, hints) == (expected, {int(fenced)})
    fences = [fence.kind for told, _, fence, _ in recorder.sync if told == "fenced"]
    assert fences == [FenceKind.TCGEN05_BEFORE, FenceKind.TCGEN05_AFTER]


def test_a_peer_that_has_exited_is_reported() -> None:
    issue = f"{PREPARE} {MMA.replace('::1', '::2')} [%r6], %rd0, %rd0, %r7, %p3;"
    text = f"""
.visible .entry k()
{{
  .reg .b32 %r<16>; .reg .b64 %rd<4>; .reg .pred %p<6>;
  mov.u32 %r3, %cluster_ctarank; setp.ne.u32 %p0, %r3, 0; @%p0 bra DONE; mov.u32 %r11, 0;
LOOP: add.u32 %r11, %r11, 1; setp.lt.u32 %p5, %r11, 20000; @%p5 bra LOOP;
  mov.u32 %r2, %tid.x; setp.eq.u32 %p1, %r2, 0; @!%p1 bra DONE;
  {issue}
DONE: ret;
}}
"""
    recorder = run.launch(text, cluster=2, policy=Policy(seed=3))
    assert "exited-cta" in recorder.codes


def test_a_pair_is_needed_for_cta_group_2() -> None:
    issue = f"{PREPARE} {MMA.replace('::1', '::2')} [%r6], %rd0, %rd0, %r7, %p3;"
    text = mma_run.program(issue, group=2)
    with pytest.raises(ExecutionError, match="no peer CTA"):
        run.launch(text)
