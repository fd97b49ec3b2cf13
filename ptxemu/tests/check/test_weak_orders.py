"""Weak outcomes of strong accesses: noted on some schedule, and not where they are forbidden."""

import numpy as np
import pytest
from tests.check.checked_run import check
from tests.check.published_litmus import CLEAN, WEAK, Published, Verdict
from tests.check.test_published_litmus import Text

from ptxemu.sched.policy import Policy

SEEDS = range(16)
PUT, GET = "W.relaxed.gpu {} {}", "R.relaxed.gpu {}"
SHAPES = {
    "2+2W": ("01", "Wx1; {f}; Wy2 | Wy1; {f}; Wx2"),
    "SB": ("01", "Wx1; {f}; Ry | Wy1; {f}; Rx"),
    "R": ("01", "Wx1; {f}; Wy1 | Wy2; {f}; Rx"),
    "S": ("01", "Wx2; {f}; Wy1 | Ry; {f}; Wx1"),
    "LB": ("01", "Rx; {f}; Wy1 | Ry; {f}; Wx1"),
    "MP": ("01", "Wx2; {f}; Wy1 | Ry; {f}; Rx"),
    "WRC": ("012", "Wx1 | Rx; {f}; Wy1 | Ry; {f}; Rx"),
    "IRIW": ("0123", "Wx1 | Wy1 | Rx; {f}; Ry | Ry; {f}; Rx"),
}
NO_FENCE = "F.acquire.cta"
"""A fence that orders nothing here."""


def program(shape: str, fence: str, verdict: Verdict) -> Published:
    """A shape of relaxed accesses with a fence between those of each thread."""
    ctas, threads = SHAPES[shape]
    words = []
    for thread in threads.format(f=fence).split("|"):
        ops = [word.strip() for word in thread.split(";")]
        ops = [
            PUT.format(op[1], op[2]) if op[0] == "W" else GET.format(op[1]) if op[0] == "R" else op
            for op in ops
        ]
        words.append("; ".join(ops))
    return Published(shape, ctas, tuple(words), verdict)


def noted(one: Published) -> list[bool]:
    """Whether each seed shows a weak order."""
    text, memory = Text(one), np.zeros(512, np.uint32)
    grid, block = 1 + int(max(one.ctas)), 32 * text.width
    found = []
    for seed in SEEDS:
        policy = Policy(seed=seed)
        codes = {
            f.code for f in check(text.body(), grid=grid, block=block, policy=policy, a=memory)
        }
        found.append("weak-order" in codes)
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_some_schedule_shows_what_hardware_may_do(shape: str) -> None:
    assert any(noted(program(shape, NO_FENCE, WEAK)))


NOTED_TOO = ("IRIW", "WRC")
"""Shapes that a read which would itself synchronise, had it read another write, is noted in."""


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape not in NOTED_TOO])
def test_no_schedule_does_where_fences_forbid_it(shape: str) -> None:
    assert not any(noted(program(shape, "F.sc.gpu", CLEAN)))


@pytest.mark.parametrize(
    ("ctas", "threads"),
    [
        # Both tell, and wait for the other.
        ("01", "W.release.gpu x 1; until.acquire.gpu y 1|W.release.gpu y 1; until.acquire.gpu x 1"),
        # A flag that goes back and forth, relaxed.
        ("01", "W.relaxed.gpu x 1; until.relaxed.gpu x 2|until.relaxed.gpu x 1; W.relaxed.gpu x 2"),
        # Two counters, which each adds to in its own order.
        ("01", "red.relaxed.gpu x 1; red.relaxed.gpu y 1|red.relaxed.gpu y 1; red.relaxed.gpu x 1"),
        # Release and acquire, through a third.
        ("012", "W.relaxed.gpu x 1; W.release.gpu y 1|until.acquire.gpu y 1; W.release.gpu z 1|"
         "until.acquire.gpu z 1; R.relaxed.gpu x"),
    ],
    ids=["handshake", "ping-pong", "counters", "relay"],
)  # fmt: skip
def test_what_waits_or_is_ordered_is_not_noted(ctas: str, threads: str) -> None:
    assert not any(noted(Published("", ctas, tuple(threads.split("|")), CLEAN)))


def test_exclusion_by_flags_needs_sequential_consistency() -> None:
    """It races in no interleaving: each looks at the other's flag once, behind setting its own."""
    threads = ("W.relaxed.gpu f 1; {0}; R.relaxed.gpu g", "W.relaxed.gpu g 1; {0}; R.relaxed.gpu f")
    found = {
        fence: any(noted(Published("", "01", tuple(one.format(fence) for one in threads), WEAK)))
        for fence in ("F.acq_rel.gpu", "F.sc.gpu")
    }
    assert found == {"F.acq_rel.gpu": True, "F.sc.gpu": False}
