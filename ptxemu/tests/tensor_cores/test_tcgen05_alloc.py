"""tcgen05.alloc, dealloc and relinquish_alloc_permit: blocking, pairs of CTAs, misuse."""

import pytest
from tests.tensor_cores import tensor_core_run as run

from ptxemu.errors import DeadlockError, ExecutionError

ALLOC = "tcgen05.alloc.cta_group::{g}.sync.aligned.shared::cta.b32 [%r0+{at}], {n};"
DEALLOC = "tcgen05.dealloc.cta_group::{g}.sync.aligned.b32 {t}, {n};"


def alloc(n: int, at: int = 0, g: int = 1) -> str:
    """Allocate n columns, the address to hold + at."""
    return ALLOC.format(n=n, at=at, g=g)


def free(n: int, at: int = 0, g: int = 1) -> str:
    """Free what `alloc(n, at)` gave."""
    return f"ld.shared.u32 %r1, [%r0+{at}];" + DEALLOC.format(n=n, g=g, t="%r1")


def program(body: str) -> str:
    """`body` with %r0 = hold."""
    return f"""
.visible .entry k()
{{
  .reg .b32 %r<8>; .reg .pred %p<2>; .shared .align 4 .b32 hold[8]; mov.u32 %r0, hold;
  {body}
  ret;
}}
"""


def test_allocations_do_not_overlap_and_leave_no_complaint() -> None:
    body = alloc(256) + alloc(128, 4) + alloc(32, 8) + free(256) + free(128, 4) + free(32, 8)
    recorder = run.launch(program(body))
    words = recorder.ctas[0].shared_words
    hold = 0x400 // 4
    assert words[hold : hold + 3].tolist() == [0, 256, 384]
    assert recorder.complaints == []


def test_freed_columns_are_given_again() -> None:
    body = alloc(256) + alloc(256, 4) + free(256) + alloc(128, 8) + free(128, 8) + free(256, 4)
    recorder = run.launch(program(body))
    assert recorder.ctas[0].shared_words[0x400 // 4 + 2] == 0
    assert recorder.complaints == []


def test_alloc_waits_until_another_warp_frees() -> None:
    body = f"""
      mov.u32 %r2, %tid.x; setp.ge.u32 %p0, %r2, 32; @%p0 bra SECOND;
      {alloc(512)} bar.sync 1; {free(512)} ret;
    SECOND:
      bar.sync 1; {alloc(512, 4)} {free(512, 4)}"""
    for _ in range(3):
        recorder = run.launch(program(body), warps=2)
        assert recorder.complaints == []


def test_alloc_that_nobody_lets_through_is_a_deadlock_that_says_so() -> None:
    with pytest.raises(DeadlockError, match=r"tcgen05.alloc waits for 512 free TMEM columns"):
        run.launch(program(alloc(512) + alloc(512, 4)))


def test_a_pair_gets_the_same_columns_when_both_have_arrived() -> None:
    only_odd = f"""
      mov.u32 %r3, %cluster_ctarank; setp.eq.u32 %p0, %r3, 0; @%p0 bra BOTH;
      {alloc(64, 0, 2)} {alloc(32, 4, 2)} {free(64, 0, 2)} {free(32, 4, 2)} ret;
    BOTH:
      {alloc(64, 0, 2)} {alloc(32, 4, 2)} {free(32, 4, 2)} {free(64, 0, 2)}"""
    recorder = run.launch(program(only_odd), cluster=2)
    hold = 0x400 // 4
    assert [c.shared_words[hold : hold + 2].tolist() for c in recorder.ctas] == [[0, 64]] * 2
    assert recorder.complaints == []


def test_a_pair_with_one_cta_missing_is_a_deadlock_that_says_so() -> None:
    body = f"""
      mov.u32 %r3, %cluster_ctarank; setp.ne.u32 %p0, %r3, 0; @%p0 bra DONE;
      {alloc(64, 0, 2)} {free(64, 0, 2)}
    DONE:"""
    with pytest.raises(DeadlockError, match=r"and for the peer CTA's tcgen05.alloc"):
        run.launch(program(body), cluster=2)


def test_a_pair_needs_a_cluster_of_two() -> None:
    with pytest.raises(ExecutionError, match="no peer CTA"):
        run.launch(program(alloc(64, 0, 2)))


@pytest.mark.parametrize("columns", [16, 48, 1024])
def test_column_counts_are_powers_of_two(columns: int) -> None:
    with pytest.raises(ExecutionError, match=f"power of two from 32 to 512; got {columns}"):
        run.launch(program(alloc(columns)))


@pytest.mark.parametrize(
    ("body", "codes"),
    [
        (alloc(64), ["tmem-leak"]),
        (alloc(64) + free(32), ["tmem-dealloc", "tmem-leak"]),
        (alloc(64) + free(64) + free(64), ["tmem-dealloc"]),
        (
            "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" + alloc(64) + free(64),
            ["tmem-alloc-after-relinquish"],
        ),
        (alloc(32) + alloc(64, 4) + free(32) + free(64, 4), ["tmem-alloc-grows"]),
    ],
)
def test_misuse_is_reported(body: str, codes: list[str]) -> None:
    recorder = run.launch(program(body))
    assert recorder.codes == codes
    assert {level for level, _, _ in recorder.complaints} == {"error"}


def test_a_dealloc_that_every_warp_executes_is_a_warning() -> None:
    body = f"""
      mov.u32 %r3, %tid.x; setp.ge.u32 %p0, %r3, 32; @%p0 bra FREE;
      {alloc(64)}
    FREE: bar.sync 0;
      {free(64)}"""
    recorder = run.launch(program(body), warps=2)
    assert [(level, code) for level, code, _ in recorder.complaints] == [
        ("warning", "tmem-dealloc-again")
    ]
    # The second frees nothing, and is no race with the first.
    assert sum("dealloc" in access.instruction.opcode for access in recorder.accesses) == 1


def test_columns_that_are_not_allocated_must_not_be_used() -> None:
    load = """.reg .b32 %v0; mov.b32 %r2, 100;
      tcgen05.ld.sync.aligned.32x32b.x1.b32 {%v0}, [%r2]; tcgen05.wait::ld.sync.aligned;"""
    recorder = run.launch(program(alloc(64) + load + free(64)))
    assert recorder.codes == ["tmem-unallocated"]
    assert "TMEM columns 100 to 100" in recorder.complaints[0][2]


def test_columns_must_not_be_used_behind_their_dealloc() -> None:
    load = """.reg .b32 %v0; mov.b32 %r2, 0;
      tcgen05.ld.sync.aligned.32x32b.x1.b32 {%v0}, [%r2]; tcgen05.wait::ld.sync.aligned;"""
    recorder = run.launch(program(alloc(64) + free(64) + load))
    assert [complaint[:2] for complaint in recorder.complaints] == [("error", "tmem-deallocated")]


def test_freeing_is_reported_as_a_write_of_the_columns() -> None:
    recorder = run.launch(program(alloc(64) + alloc(32, 4) + free(32, 4) + free(64)))
    first, second = [a for a in recorder.accesses if a.space.value == "tmem"]
    assert (first.size, int(first.starts[1])) == (32 * 4, 2048 + 64 * 4)
    assert (second.size, len(second.starts), second.kind.value) == (64 * 4, 128, "write")
