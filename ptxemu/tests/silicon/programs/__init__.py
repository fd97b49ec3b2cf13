"""The programs that run on hardware and in ptxemu: one instruction a program."""

import importlib
from functools import lru_cache

from tests.silicon.programs.case import Program

MODULES = (
    "arithmetic", "bits", "approx", "convert", "memory", "atomics", "warp_sync", "barriers",
    "mbarrier", "cp_async", "matrix_move", "bulk", "wgmma", "cluster", "tma", "nans", "warp_mma",
    "wgmma_sparse", "im2col", "forms", "copies",
)  # fmt: skip


@lru_cache(maxsize=1)
def _all() -> tuple[Program, ...]:
    programs: list[Program] = []
    for module in MODULES:
        programs += importlib.import_module(f"tests.silicon.programs.{module}").programs()
    names = [p.name for p in programs]
    repeated = {n for n in names if names.count(n) > 1} if len(set(names)) < len(names) else set()
    if repeated:
        raise ValueError(f"names: {sorted(repeated)}")
    return tuple(programs)


def all_programs() -> list[Program]:
    """Every program of every family, in a fixed order."""
    return list(_all())
