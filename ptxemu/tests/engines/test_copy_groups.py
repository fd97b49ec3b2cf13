"""cp.async and bulk copies: groups and waits, and what is refused."""

import numpy as np
import pytest
from tests.engines.copy_runner import EAGER, LATE, address, run
from tests.kernel_run import Recorder

from ptxemu.descriptors.tensor_map import encode_tiled
from ptxemu.errors import ExecutionError, UnsupportedInstructionError
from ptxemu.machine.lanes import FULL, LANE_IDS
from ptxemu.sched.policy import Policy

# Groups: what a wait guarantees, and what happens to those who do not wait.

FILL = """
  shl.b32 %r0, %tid, 2; add.u32 %r1, %smem, %r0; add.u32 %r2, %tid, 100;
  st.shared.u32 [%r1], %r2; fence.proxy.async; bar.sync 0;
"""
SPOIL = "st.shared.u32 [%r1], 7; bar.sync 0;"
STORE = "@%p0 cp.async.bulk.global.shared::cta.bulk_group [%out], [%smem], 128;"
COMMIT = "cp.async.bulk.commit_group;"
STORED = np.arange(100, 132, dtype=np.uint32)


def stored(wait: str, policy: Policy) -> np.ndarray:
    """What a bulk store writes whose source is overwritten behind `wait`."""
    out = np.zeros(32, np.uint32)
    run(FILL + STORE + COMMIT + wait + "bar.sync 0;" + SPOIL, {"out": out}, policy=policy)
    return out


@pytest.mark.parametrize("wait", ["wait_group.read 0", "wait_group 0"])
@pytest.mark.parametrize("seed", range(4))
def test_source_may_be_overwritten_behind_the_wait(wait: str, seed: int) -> None:
    policies = (LATE, EAGER, Policy("random", "random", seed))
    for policy in policies:
        assert np.array_equal(stored(f"cp.async.bulk.{wait};", policy), STORED)


def test_source_overwritten_without_a_wait_gives_wrong_data_when_the_copy_is_late() -> None:
    assert (stored("", LATE) == 7).all()
    assert np.array_equal(stored("", EAGER), STORED)


def test_wait_that_allows_a_group_does_not_wait_for_it() -> None:
    assert (stored("cp.async.bulk.wait_group.read 1;", LATE) == 7).all()


def test_wait_without_read_means_that_the_writes_are_done() -> None:
    for wait, expected in (("wait_group 0", 100), ("wait_group.read 0", 0)):
        out, seen = np.zeros(32, np.uint32), np.zeros(1, np.uint32)
        body = f"{FILL} {STORE} {COMMIT} cp.async.bulk.{wait};"
        body += "ld.global.u32 %r5, [%out]; @%p0 st.global.u32 [%seen], %r5;"
        run(body, {"out": out, "seen": seen}, policy=LATE)
        assert seen[0] == expected
        assert np.array_equal(out, STORED)


def test_only_the_oldest_groups_are_waited_for() -> None:
    two = """
      @%p0 cp.async.bulk.global.shared::cta.bulk_group [%out], [%smem], 64;
      cp.async.bulk.commit_group; add.u32 %r8, %smem, 64; add.u64 %rd0, %out, 64;
      @%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r8], 64;
      cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 1; bar.sync 0;
    """
    out = np.zeros(32, np.uint32)
    run(FILL + two + SPOIL, {"out": out}, policy=LATE)
    assert np.array_equal(out[:16], STORED[:16])


def test_uncommitted_store_is_not_waited_for() -> None:
    out = np.zeros(32, np.uint32)
    run(FILL + STORE + "cp.async.bulk.wait_group.read 0;" + SPOIL, {"out": out}, policy=LATE)
    assert (out == 7).all()


def test_groups_belong_to_threads() -> None:
    other = "setp.eq.u32 %p1, %tid, 1; @%p1 cp.async.bulk.wait_group.read 0; bar.sync 0;"
    out = np.zeros(32, np.uint32)
    run(FILL + STORE + COMMIT + other + SPOIL, {"out": out}, policy=LATE)
    assert (out == 7).all()


def test_wait_is_told_to_the_observer_with_what_it_covers() -> None:
    body = FILL + STORE + COMMIT
    observer = Recorder()
    waits = "cp.async.bulk.wait_group.read 0; cp.async.bulk.wait_group 0;"
    run(body + waits, {"out": np.zeros(32, np.uint32)}, observer=observer)
    joined = [(operation.kind, reads_only) for operation, reads_only in observer.joined]
    assert joined == [("cp.async.bulk", True), ("cp.async.bulk", False)]


def test_identical_stores_of_a_warp_are_one_copy() -> None:
    every = STORE.replace("@%p0 ", "")
    out = np.zeros(32, np.uint32)
    result = run(FILL + every + COMMIT + "cp.async.bulk.wait_group 0;", {"out": out})
    assert result.async_operations == 1
    assert np.array_equal(out, STORED)


def test_stores_of_lanes_with_different_operands_are_different_copies() -> None:
    body = """
      shl.b32 %r5, %tid, 4; add.u32 %r6, %smem, %r5;
      cvt.u64.u32 %rd0, %r5; add.u64 %rd0, %out, %rd0; setp.lt.u32 %p1, %tid, 8;
      @%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r6], 16;
    """
    out = np.zeros(32, np.uint32)
    result = run(FILL + body + COMMIT + "cp.async.bulk.wait_group 0;", {"out": out})
    assert result.async_operations == 8
    assert np.array_equal(out, STORED)


THREAD_COPY = """
  shl.b32 %r0, %tid, 2; add.u32 %r1, %smem, %r0; cvt.u64.u32 %rd0, %r0;
  add.u64 %rd1, %in, %rd0; add.u64 %rd2, %out, %rd0; st.shared.u32 [%r1], 5;
  cp.async.ca.shared.global [%r1], [%rd1], 4;
"""
READ_BACK = "ld.shared.u32 %r9, [%r1]; st.global.u32 [%rd2], %r9;"


def copied(waits: str, policy: Policy) -> np.ndarray:
    """What a thread finds that cp.async has copied to, behind `waits`."""
    source, out = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    run(THREAD_COPY + waits + READ_BACK, {"in": source, "out": out}, policy=policy)
    return out


@pytest.mark.parametrize(
    "waits",
    [
        "cp.async.commit_group; cp.async.wait_group 0;",
        "cp.async.wait_all;",
        "cp.async.commit_group; cp.async.commit_group; cp.async.wait_group 1;",
    ],
)
def test_cp_async_is_there_behind_its_wait(waits: str) -> None:
    for policy in (LATE, EAGER, Policy("random", "random", 3)):
        assert np.array_equal(copied(waits, policy), np.arange(32))


@pytest.mark.parametrize(
    "waits", ["", "cp.async.wait_group 0;", "cp.async.commit_group; cp.async.wait_group 1;"]
)
def test_cp_async_may_be_missing_without_its_wait(waits: str) -> None:
    assert (copied(waits, LATE) == 5).all()


ARRIVE = """
  @%p0 mbarrier.init.shared::cta.b64 [%bar], {count}; bar.sync 0;
  {copy}
  cp.async.mbarrier.arrive{noinc}.shared::cta.b64 [%bar];
  {then}
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%bar], 0; @!%p2 bra WAIT;
"""


@pytest.mark.parametrize(
    ("noinc", "count", "then"),
    [
        (".noinc", 32, ""),
        ("", 32, "mbarrier.arrive.shared::cta.b64 _, [%bar];"),
        (".noinc", 64, "mbarrier.arrive.shared::cta.b64 _, [%bar];"),
    ],
)
def test_mbarrier_completes_when_the_threads_copies_have(noinc: str, count: int, then: str) -> None:
    body = ARRIVE.format(count=count, noinc=noinc, then=then, copy=THREAD_COPY)
    for policy in (LATE, EAGER, Policy("random", "random", 5)):
        source, out = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
        run(body + READ_BACK, {"in": source, "out": out}, policy=policy)
        assert np.array_equal(out, source)


def test_later_arrival_covers_the_copies_of_earlier_ones() -> None:
    body = ARRIVE.format(count=64, noinc=".noinc", copy=THREAD_COPY, then="").replace(
        "WAIT:", "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%bar];\nWAIT:"
    )
    source, out = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    run(body + READ_BACK, {"in": source, "out": out}, policy=LATE)
    assert np.array_equal(out, source)


def test_groups_count_commits_by_thread() -> None:
    from ptxemu.engines.groups import Groups

    class Operation:
        completed = sources_read = False

    groups, first, second = Groups(), Operation(), Operation()
    low = LANE_IDS < 16
    groups.add(first, FULL)  # type: ignore[arg-type]
    groups.commit(low)
    groups.commit(~low)
    groups.commit(low)
    groups.add(second, low)  # type: ignore[arg-type]
    groups.commit(low)
    assert [m.operation for m in groups.due(FULL, 0)] == [first, first, second]
    assert [m.operation for m in groups.due(low, 2)] == [first]
    assert groups.due(low, 3) == []
    assert groups.due(~low, 1) == []
    groups.join(groups.due(low, 1), low)
    assert [m.operation for m in groups.due(low, 0)] == [second]


def test_cp_async_outside_of_memory_names_the_instruction() -> None:
    with pytest.raises(ExecutionError, match=r"PTX line \d+.*cp.async #.*illegal global address"):
        run(
            "cp.async.ca.shared.global [%smem], [%rd3], 4; cp.async.wait_all;",
            {"out": np.zeros(4, np.uint32)},
            registers="mov.u64 %rd3, 64;",
        )


# Copies that hardware traps on or that nobody defines: each is an error that names the cause.

ARRAY = np.zeros((32, 64), np.uint16)
INIT = "@%p0 mbarrier.init.shared::cta.b64 [%bar], 1; fence.proxy.async; bar.sync 0;"
LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
TENSOR_STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
OUT = "cp.async.bulk.global.shared::cta.bulk_group"


def matrix(**changes: object) -> bytes:
    given: dict[str, object] = {
        "data_type": 1,
        "address": address(ARRAY),
        "dims": (64, 32),
        "strides": (128,),
        "box": (16, 4),
    }
    return encode_tiled(**{**given, **changes})  # type: ignore[arg-type]


FLAT = matrix(dims=(64,), strides=(), box=(16,))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (f"{LOAD} [%smem], [%map, {{1, 0}}], [%bar];", "coordinate 1 of u16 is no multiple of 16"),
        (f"{LOAD} [%smem+64], [%map, {{0, 0}}], [%bar];", "not aligned to 128 bytes"),
        (f"{LOAD} [%smem+1024], [%map, {{0, 0}}], [%bar];", "ILLEGAL_ADDRESS"),
        (f"{TENSOR_STORE} [%map, {{-16, 0}}], [%smem];", r"negative coordinates \(-16, 0\)"),
        (f"{TENSOR_STORE} [%map, {{0, 0}}], [%smem+16];", "not aligned to 128 bytes"),
        (f"{LOAD} [%smem], [%flat, {{0, 0}}], [%bar];", "2 coordinates; .* rank is 1"),
        (f"{LOAD} [%smem], [%map+32, {{0, 0}}], [%bar];", "not aligned to 64 bytes"),
        (f"{COPY} [%smem], [%in], 24, [%bar];", "size 24 is not a multiple of 16"),
        (f"{COPY} [%smem], [%in+8], 32, [%bar];", "global address 0x.*8 is not aligned to 16"),
        (f"{COPY} [%smem+8], [%in], 32, [%bar];", "shared address 0x.*8 is not aligned to 16"),
        ("cp.async.ca.shared.global [%smem], [%in+2], 4;", "not aligned to 4"),
        ("cp.async.cg.shared.global [%smem], [%in+8], 16;", "not aligned to 16"),
        (f"{OUT} [%in], [%smem], 8;", "size 8 is not a multiple of 16"),
        (f"{COPY} [%smem], [%in], 1040, [%bar];", "beyond the CTA's"),
        (
            "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group "
            "[%map, {0, 0}], [%smem];",
            "no .add of the tensor map's u16",
        ),
        ("mov.b16 %h0, 2;" + COPY + ".multicast::cluster [%smem], [%in], 16, [%bar], %h0;", "mask"),
    ],
)
def test_illegal_copy_is_an_error(body: str, message: str) -> None:
    with pytest.raises(ExecutionError, match=rf"PTX line \d+.*{message}"):
        run(
            INIT + "@!%p0 bra END;" + body + "END:",
            {"map": matrix(), "flat": FLAT, "in": np.zeros((1024,), np.uint8)},
            smem=1024,
        )


@pytest.mark.parametrize(
    "body", [f"{COPY} [%smem], [%in+1024], 16, [%bar];", f"{OUT} [%in+1024], [%smem], 16;"]
)
def test_copy_beyond_an_allocation_is_an_error_of_the_operation(body: str) -> None:
    with pytest.raises(ExecutionError, match=r"cp.async.bulk #\d+ issued by .*illegal global"):
        run(INIT + "@%p0 " + body, {"in": np.zeros(1024, np.uint8)}, smem=1024)


def test_tile_beyond_an_allocation_is_an_error() -> None:
    body = f"{INIT} @%p0 {LOAD} [%smem], [%map, {{0, 32}}], [%bar];"
    with pytest.raises(ExecutionError, match="illegal global address"):
        run(body, {"map": matrix(dims=(64, 64)), "in": ARRAY})


def test_signal_without_an_mbarrier_is_an_error() -> None:
    with pytest.raises(ExecutionError, match="no mbarrier was initialised"):
        run(f"@%p0 {COPY} [%smem], [%in], 16, [%bar];", {"in": ARRAY})


def test_mbarrier_of_another_cta_is_an_error() -> None:
    body = f"{INIT} mapa.shared::cluster.u32 %r0, %bar, 1; @%p0 {COPY} [%smem], [%in], 16, [%r0];"
    with pytest.raises(ExecutionError, match="the mbarrier is in cta"):
        run(body, {"in": ARRAY}, cluster=2)


def test_shared_cta_address_of_another_cta_is_an_error() -> None:
    body = f"{INIT} mapa.shared::cluster.u32 %r0, %smem, 1; @%p0 {OUT} [%in], [%r0], 16;"
    with pytest.raises(ExecutionError, match="shared::cta address"):
        run(body, {"in": ARRAY}, cluster=2)


def test_maps_of_blackwell_are_refused_on_hopper() -> None:
    body = f"{INIT} @%p0 {LOAD} [%smem], [%map, {{0, 0}}], [%bar];"
    with pytest.raises(ExecutionError, match="sm_90a has no tensor map"):
        run(body, {"map": matrix(swizzle=4), "in": ARRAY})


def test_interleaved_map_is_refused() -> None:
    body = f"{INIT} @%p0 {LOAD} [%smem], [%map, {{0, 0, 0}}], [%bar];".replace("2d", "3d")
    made = matrix(interleave=1, dims=(64, 32, 1), strides=(128, 4096), box=(8, 4, 1))
    with pytest.raises(UnsupportedInstructionError, match="interleaved"):
        run(body, {"map": made, "in": ARRAY})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LOAD.replace("tile", "im2col") + " [%smem], [%map, {0, 0}], [%bar];", "im2col"),
        (LOAD.replace("2d", "3d") + " [%smem], [%map, {0, 0}], [%bar];", "expected 3 coord"),
        (f"{LOAD}.multicast::cluster [%smem], [%map, {{0, 0}}], [%bar];", "expected 4 operands"),
        (f"{LOAD}.funny [%smem], [%map, {{0, 0}}], [%bar];", "modifier .funny"),
        ("cp.async.cg.shared.global [%smem], [%map], 8;", "cp-size 8 with .cg"),
        (
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f16 [%map], [%smem], 16;",
            "noftz",
        ),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.inc.s32 [%map], [%smem], 16;", "inc"),
        ("tensormap.replace.tile.box_dim.global.b1024.b32 [%map], 5, 1;", "ord"),
    ],
)
def test_unknown_form_is_refused_at_load(text: str, message: str) -> None:
    with pytest.raises(UnsupportedInstructionError, match=message):
        run(text, {"map": matrix()})


def test_copy_into_an_mbarrier_is_a_complaint() -> None:
    body = f"""{INIT} @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 16;
      @%p0 {COPY} [%r1], [%in], 16, [%bar];
    WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%bar], 0;
      @!%p2 bra WAIT;"""
    observer = Recorder()
    run(body, {"in": ARRAY}, registers="and.b32 %r1, %bar, -16;", observer=observer)
    assert [entry[:2] for entry in observer.complaints] == [("error", "mbarrier-overwritten")]
