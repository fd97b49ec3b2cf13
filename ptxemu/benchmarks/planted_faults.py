"""Counts how hard planted faults in the kernels of the benchmarks stop: `ptxemu mutate` on each.

    python benchmarks/planted_faults.py    # three minutes on 2 cores

Hard: a deadlock, an error of the machine or of the check. A mutant that is redundant in its launch
counts as no fault.
"""

from __future__ import annotations

import sys
from collections import Counter

import kernels
import small_kernels as small

from ptxemu import api
from ptxemu.launch_setup import LaunchSetup
from ptxemu.memory.global_memory import GlobalMemory
from ptxemu.mutate import Replay, mutate

HARD = ("deadlock", "error", "finding")
CASES = (
    lambda: small.shared_gemm(32),
    lambda: kernels.shared_barrier(4),
    lambda: small.state_waits(4),
    lambda: kernels.attention(4),
)


def replay(case: kernels.Case) -> Replay:
    """A case as what `mutate` runs again and again."""
    memory = GlobalMemory()
    for array in case.arrays:
        memory.register(api.array_bytes(array), "array of a tensor map")
    module, args = api.load(case.text), tuple(case.args)
    shape = case.grid, case.block, args, memory, case.cluster, case.smem
    return Replay(LaunchSetup(module, "k", *shape))


def main() -> int:
    """Print a row for each kind of instruction: hard, warning, note, nothing."""
    kinds: dict[str, Counter[str]] = {}
    for make in CASES:
        case = make()
        sys.stderr.write(f"{case.name}: {case.about}\n")
        for result in mutate(replay(case))[1]:
            if result.verdict in ("caught", "noted", "survived"):
                hard = "hard" if result.how in HARD else result.how or result.verdict
                kinds.setdefault(result.mutation.site.category, Counter())[hard] += 1
    total = sum(kinds.values(), Counter())
    for kind, counts in (*sorted(kinds.items()), ("all", total)):
        found = ", ".join(f"{how} {count}" for how, count in counts.most_common())
        print(f"{kind:16} {counts['hard'] / counts.total():4.0%} hard of {counts.total()}: {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
