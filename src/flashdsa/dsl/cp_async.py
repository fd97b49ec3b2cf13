"""cp.async: copies of 16 or 4 bytes by single threads from device memory into swizzled tiles."""

from collections.abc import Sequence
from typing import Any

from flashdsa.dsl import ptx

COPY_BYTES = 16


def copy_units(
    to: Any, source: Any, row: Any, places: Sequence[tuple[int, int]], ahead: int = 256
) -> None:
    """Copy 16 bytes for each of `places`.

    Args:
        to: shared memory address. source: pointer to device memory.
        row: if it is negative zeros come, and `source` is not accessed.
        places: offsets in bytes from `to` and from `source`.
        ahead: 64, 128 or 256 bytes of a row that the second-level cache prefetches.
    """
    copies = "".join(
        f"cp.async.cg.shared.global.L2::{ahead}B [{{$r0}} + {target}], [{{$r1}} + {offset}], "
        f"{COPY_BYTES}, none; "
        for target, offset in places
    )
    ptx.run(f"{{ .reg .pred none; setp.lt.s32 none, {{$r2}}, 0; {copies}}}", to, source, row)


def copy_word(to: Any, source: Any, row: Any, target: int, offset: int) -> None:
    """Copy 4 bytes from `offset` bytes after `source` to `target` bytes after `to`; see
    `copy_units`."""
    ptx.run(
        "{ .reg .pred none; setp.lt.s32 none, {$r2}, 0; "
        f"cp.async.ca.shared.global.L2::128B [{{$r0}} + {target}], [{{$r1}} + {offset}], 4, none; "
        "}",
        to,
        source,
        row,
    )


def commit_copies() -> None:
    """End a group: of the copies of this thread since the group before."""
    ptx.run("cp.async.commit_group;")


def wait_for_copies(groups: int) -> None:
    """Wait for this thread's groups of copies but the last `groups`; it sees them then."""
    ptx.run(f"cp.async.wait_group {groups};")


def arrive_when_copied(barrier: Any) -> None:
    """Arrive for this thread as soon as all its copies so far have come; do not wait.

    The copies are writes of the generic proxy, which the arrival announces: who reads them through
    the asynchronous proxy (wgmma) fences it after the wait.
    """
    ptx.run("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{$r0}];", barrier)
