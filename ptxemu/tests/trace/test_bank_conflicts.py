"""Wavefronts of shared accesses against cases counted by hand."""

import numpy as np
import pytest

from ptxemu.trace.bank_conflicts import wavefronts

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
