"""The Hopper indexer's compiled kernel on the CPU: what a GPU would run, on ptxemu and checked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from flashdsa.backends.cpu.indexer import check_values
from flashdsa.backends.sm90.clusters import Clusters
from flashdsa.backends.sm90.indexer import require_layout
from flashdsa.errors import UnsupportedError
from flashdsa.jit.loader import compile_plan
from flashdsa.kernels.catalog import INDEXER
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan
from flashdsa.operands import TopkIndexerOperands
from flashdsa.settings import Settings
from ptxemu.check import Finding
from ptxemu.launch_setup import LaunchSetup

CLUSTERS = Clusters(number=2, size=2, teams=1)
"""Of an emulated launch: few enough to wait for, enough to deal rows to and to share them."""
POISON = 0x7F7F7F7F
"""What device memory between CTAs holds that the kernel must not rely on."""


@dataclass(frozen=True)
class EmulatedLaunch:
    """What a launch said besides its output.

    Attributes:
        findings: warnings and notes of the check. setup: what was launched.
        arrivals: the counters that the kernel must leave at 0.
    """

    findings: tuple[Finding, ...]
    setup: LaunchSetup
    arrivals: Tensor


def topk_indexer(operands: TopkIndexerOperands, *, sorted: bool, check: bool) -> None:
    """The backend "emulate-sm90": as the backend "sm90", on CPU tensors.

    Raises:
        ptxemu.HazardError: the kernel has a race, a bad access or another hazard.
    """
    require_layout(*operands)
    cache, ids = operands.k_index_cache_fp8, operands.topk_indices
    if check and Settings.from_environment().check:
        check_values(operands.seq_lens, operands.block_table, cache.shape[0])
    if ids.shape[0] == 0 or cache.shape[0] == 0:
        ids.fill_(-1)
        return
    plan = IndexerPlan(
        num_heads=operands.q_index_fp8.shape[1],
        topk=ids.shape[1],
        sorted=sorted,
        dealt=sorted or ids.shape[0] > CLUSTERS.number,
    )
    emulate_indexer(plan, *operands)


def emulate_indexer(
    plan: IndexerPlan,
    q_index_fp8: Tensor,
    k_index_cache_fp8: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk_indices: Tensor,
    *,
    clusters: tuple[int, int, int] = CLUSTERS,
    seed: int = 0,
) -> EmulatedLaunch:
    """One checked launch of the plan's kernel, written into `topk_indices`.

    Args:
        clusters: how many, CTAs of each, clusters of each row of `plan.team_pages` pages or more.
        seed: of the order in which warps and asynchronous work take turns.

    Raises:
        ptxemu.HazardError: the check found an error.
    """
    function = compiled(plan)
    from ptxemu.cutedsl import emulate

    arrivals = torch.zeros(len(seq_lens), dtype=torch.int32)
    number, size, teams = clusters
    assert teams == 1 or plan.teams
    how: tuple[Any, ...] = (number, size)
    if plan.teams:
        slots = torch.full((number * size, plan.slot_words), POISON, dtype=torch.int32)
        how = (arrivals, slots, *clusters)
    setups: list[LaunchSetup] = []
    with emulate(arch="sm_90a", seed=seed, on_launch=setups.append) as run:
        function(
            q_index_fp8,
            k_index_cache_fp8.view(torch.uint8),
            weights,
            seq_lens,
            block_table,
            topk_indices,
            *how,
        )
    (setup,) = setups
    return EmulatedLaunch(tuple(run.findings), setup, arrivals)


@lru_cache(maxsize=8)
def compiled(plan: IndexerPlan) -> Any:
    """The plan's function, made so that the emulator has its PTX; needs no GPU."""
    for package in ("cutlass", "llvmlite", "tvm_ffi"):
        if find_spec(package) is None:
            raise UnsupportedError(f"the emulator needs {package}: pip install 'flashdsa[emulate]'")
    import ptxemu.cutedsl  # noqa: F401 - keeps the PTX of what is compiled from here on

    return compile_plan(INDEXER, plan)
