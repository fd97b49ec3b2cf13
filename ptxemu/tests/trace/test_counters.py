"""Counts of small kernels and wavefronts of shared accesses, counted by hand."""

import numpy as np
import pytest
from tests.kernel_run import TID, source

from ptxemu import api
from ptxemu.trace import Counters
from ptxemu.trace.counters import wavefronts
from ptxemu.trace.text import conflicts_text, counters_text
from tests import producer_consumer

# Wavefronts of shared accesses against cases counted by hand.

LANES = np.arange(32)


@pytest.mark.parametrize(
    ("starts", "size", "needed", "taken"),
    [
        pytest.param(4 * LANES, 4, 1, 1, id="a word a lane in order"),
        pytest.param(4 * LANES[::-1], 4, 1, 1, id="in any order"),
        pytest.param(8 * LANES, 4, 1, 2, id="every other word: two lanes a bank"),
        pytest.param(128 * LANES, 4, 1, 32, id="one bank for all"),
        pytest.param(0 * LANES, 4, 1, 1, id="one word for all is shared"),
        pytest.param(2 * LANES, 2, 1, 1, id="halves of a word are one word"),
        pytest.param(132 * LANES, 4, 1, 1, id="rows padded by a word"),
        pytest.param(8 * LANES, 8, 2, 2, id="64 bits in two half-warps"),
        pytest.param(16 * LANES, 8, 2, 4, id="64 bits at a stride of 16 bytes"),
        pytest.param(16 * LANES, 16, 4, 4, id="128 bits in four quarter-warps"),
        pytest.param(128 * LANES, 16, 4, 32, id="128 bits, one row of banks a lane"),
        pytest.param(32 * LANES, 32, 8, 8, id="256 bits in eight parts"),
    ],
)
def test_a_full_warp_takes_as_many_wavefronts_as_counted_by_hand(starts, size, needed, taken):
    found = wavefronts(starts.astype(np.int64), size, LANES)
    assert (found.needed, found.taken, found.conflicts) == (needed, taken, taken - needed)


def test_phases_go_by_lane_and_not_by_position():
    """Lanes 0 and 31 of a 64-bit access are in different halves, so they never conflict."""
    starts = np.array([0, 128], dtype=np.int64)
    assert wavefronts(starts, 8, np.array([0, 31])).taken == 2
    assert wavefronts(starts, 8, np.array([0, 1])).conflicts == 1


def test_a_phase_without_active_lanes_costs_nothing():
    starts = 16 * np.arange(8, dtype=np.int64)
    assert wavefronts(starts, 16, np.arange(8)).taken == 1


# Counts of small kernels against what can be counted in their text.


@pytest.fixture(scope="module")
def counted():
    counters = Counters()
    _, result = producer_consumer.launch(observer=counters)
    return counters, result


def only(counters, roles=None):
    (counts,) = counters.by_role(roles or {})
    return counts


def test_every_warp_instruction_is_in_one_class(counted):
    counters, result = counted
    total = sum(c.instructions.total() for c in counters.by_role({}))
    assert total == result.warp_instructions


def test_classes_of_the_warp_that_copies(counted):
    counters, _ = counted
    first = counters.by_role({})[0]
    assert first.instructions["sync"] == 10
    assert first.instructions["copy"] == 2
    assert first.instructions["memory"] == 4
    assert first.instructions["compare"] == 1
    assert first.instructions["move"] == 2
    assert first.instructions["integer"] == 6


def test_bytes_by_path_count_each_copy_once(counted):
    counters, _ = counted
    first, *others = counters.by_role({})
    assert first.bytes["global -> shared (bulk load)"] == producer_consumer.BYTES
    assert first.bytes["shared -> global (bulk store)"] == producer_consumer.BYTES
    for counts in (first, *others):
        assert counts.bytes["shared ld"] == counts.bytes["shared st"] == 32 * 4
    assert not others[0].operations


def test_warps_of_a_role_are_added_up(counted):
    counters, result = counted
    roles = {0: "copy", 1: "compute", 2: "compute", 3: "compute"}
    copy, compute = counters.by_role(roles)
    assert (copy.name, copy.warps) == ("copy", [0])
    assert (compute.name, compute.warps) == ("compute", [1, 2, 3])
    assert compute.bytes["shared ld"] == 3 * 32 * 4
    total = copy.instructions.total() + compute.instructions.total()
    assert total == result.warp_instructions


def test_roles_are_guessed_from_the_units_that_a_warp_uses(counted):
    assert counted[0].guessed_roles() == {0: "load+store"}


def count(body, **options):
    arrays = {"out": np.zeros(64, np.uint32)}
    counters = Counters()
    api.load(source(TID + body, arrays, shared=8192)).launch(
        "k", 1, 32, args=list(arrays.values()), observer=counters, **options
    )
    return only(counters)


def test_a_strided_store_shows_its_conflicts_with_its_line():
    counts = count(
        """
        mov.u32 %r1, smem; shl.b32 %r2, %r0, 7; add.u32 %r2, %r1, %r2; st.shared.u32 [%r2], %r0;
        """
    )
    (bank,) = counts.banks.values()
    assert (bank.executions, bank.needed, bank.taken) == (1, 1, 32)
    text = conflicts_text([counts])
    assert "31 extra wavefronts in 1 shared accesses" in text
    assert str(bank.instruction.span.ptx_line) in text


def test_predicated_lanes_are_the_lanes_that_are_counted():
    """Lanes 15 and 16 are in different half-warps of a 64-bit access, although neighbours."""
    counts = count(
        """
        mov.u32 %r1, smem; shl.b32 %r2, %r0, 7; add.u32 %r2, %r1, %r2; add.u32 %r3, %r0, 1;
        and.b32 %r3, %r3, 30; setp.eq.u32 %p0, %r3, 16; mov.b64 %rd5, 0;
        @%p0 st.shared.b64 [%r2], %rd5;
        """
    )
    (bank,) = counts.banks.values()
    assert (bank.needed, bank.taken) == (2, 2)


def test_instructions_whose_guard_never_holds_are_control():
    counts = count(
        """
        setp.gt.u32 %p0, %r0, 99; mov.u32 %r1, smem; @%p0 st.shared.u32 [%r1], %r0;
        """
    )
    assert counts.instructions["control"] == 2  # the store and the exit
    assert not counts.bytes["shared st"]


def test_the_tables_name_roles_and_paths(counted):
    text = counters_text(counted[0].by_role({0: "copy"}))
    assert "copy (0)" in text
    assert "global -> shared (bulk load)" in text
    assert "bank conflicts: none in 8 shared accesses" in text
