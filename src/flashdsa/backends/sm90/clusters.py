"""How many CTAs share a row: the largest clusters of which one for every row runs at once.

A long row gets several of them, a *team* each, if there are enough for all rows. With more rows
than clusters the kernel looks at the lengths and may halve the clusters (see its order.py).
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping
from typing import NamedTuple

import torch

from flashdsa.backends.sm90.empty_kernel import cubin
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan

logger = logging.getLogger("flashdsa.sm90")

SIZES = (16, 14, 12, 10, 8, 7, 6, 5, 4, 3, 2)
"""Clusters to choose from, largest first; of two that run equally often the larger one is better.
An H200 runs at once, by size 1 to 16: 132, 66, 39, 30, 22, 17, 15, 15, 9, then 7. Not 9: eight
rows of 16K tokens take as long with 9 CTAs each as with 8, or 0.6 us longer."""
TEAMS_BY_SIZE = 2
"""Teams of a row, at most, by the CTAs of each: what they publish has room in one's lists."""


class Clusters(NamedTuple):
    """Of a launch."""

    number: int
    size: int  # CTAs of each
    teams: int  # clusters of a long row


_capacities: dict[int, Mapping[int, int]] = {}
_chosen: dict[tuple[int, int], Clusters] = {}


def clusters_for(device: int, rows: int) -> Clusters:
    """What a launch of `rows` rows on the device is to have; asks the driver once a device."""
    chosen = _chosen.get((device, rows))
    if chosen is None:
        if device not in _capacities:
            _capacities[device] = cluster_capacity(device)
        chosen = _chosen[device, rows] = choose_clusters(_capacities[device], rows)
    return chosen


def without_teams(clusters: Clusters) -> Clusters:
    """For kernels that have no teams."""
    return Clusters(clusters.number // clusters.teams, clusters.size, 1)


def choose_clusters(capacity: Mapping[int, int], rows: int) -> Clusters:
    """As `clusters_for`, by the number of clusters of each size that run at once."""
    for size in SIZES:
        if size == 2 and rows <= 2 * capacity.get(4, 0):
            return Clusters(capacity[4], 4, 1)
        if capacity.get(size, 0) >= rows:
            teams = min(capacity[size] // rows, TEAMS_BY_SIZE * size)
            return Clusters(rows * teams, size, teams)
    pairs = capacity.get(2, 0)
    return Clusters(pairs, 2, 1) if pairs else Clusters(min(rows, capacity[1]), 1, 1)


def cluster_capacity(device: int) -> dict[int, int]:
    """CTAs of a cluster -> clusters of the indexer's CTAs that run at once; 0: such ones cannot.

    Where the driver does not say, with a warning: one CTA an SM, and pairs of them.
    """
    try:
        return _ask_driver(device, IndexerPlan())
    except (OSError, AttributeError, _DriverError) as error:
        logger.warning("the driver does not say how many clusters run at once: %s", error)
        sms: int = torch.cuda.get_device_properties(device).multi_processor_count
        return {1: sms, 2: sms // 2}


class _DriverError(Exception):
    """A call of the CUDA driver failed."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_uint * 16),
    )


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
MORE_THAN_8_CTAS = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
INVALID_CLUSTER_SIZE = 912  # CUDA_ERROR_INVALID_CLUSTER_SIZE


def _call(driver: ctypes.CDLL, name: str, *arguments: object) -> None:
    code = getattr(driver, name)(*arguments)
    if code:
        raise _DriverError(f"{name} returned {code}")


def _ask_driver(device: int, plan: IndexerPlan) -> dict[int, int]:
    """About a kernel of the plan's threads and shared memory that does nothing."""
    driver = ctypes.CDLL("libcuda.so.1")
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _call(driver, "cuInit", 0)
    _call(driver, "cuDeviceGet", ctypes.byref(handle), device)
    _call(driver, "cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    try:
        _call(driver, "cuCtxPushCurrent_v2", context)
        try:
            return _ask_in_context(driver, plan)
        finally:
            _call(driver, "cuCtxPopCurrent_v2", ctypes.byref(context))
    finally:
        _call(driver, "cuDevicePrimaryCtxRelease_v2", handle)


def _ask_in_context(driver: ctypes.CDLL, plan: IndexerPlan) -> dict[int, int]:
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _call(driver, "cuModuleLoadData", ctypes.byref(module), cubin())
    try:
        _call(driver, "cuModuleGetFunction", ctypes.byref(function), module, b"k")
        _call(driver, "cuFuncSetAttribute", function, SHARED_BYTES, plan.smem.total)
        _call(driver, "cuFuncSetAttribute", function, MORE_THAN_8_CTAS, 1)
        return {size: _count(driver, function, plan, size) for size in (1, *reversed(SIZES))}
    finally:
        _call(driver, "cuModuleUnload", module)


def _count(driver: ctypes.CDLL, function: ctypes.c_void_p, plan: IndexerPlan, size: int) -> int:
    """Clusters of `size` CTAs that run at once."""
    attribute = _Attribute(CLUSTER_DIMENSION, 0, (size, 1, 1))
    launch = _Launch(
        (size, 1, 1), (plan.threads, 1, 1), plan.smem.total, None, ctypes.pointer(attribute), 1
    )
    count = ctypes.c_int()
    arguments = (ctypes.byref(count), function, ctypes.byref(launch))
    code = driver.cuOccupancyMaxActiveClusters(*arguments)
    if code == INVALID_CLUSTER_SIZE:
        return 0
    if code:
        raise _DriverError(f"cuOccupancyMaxActiveClusters returned {code} for {size} CTAs")
    return count.value
