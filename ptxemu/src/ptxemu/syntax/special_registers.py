"""The names of PTX's special registers, which need no declaration."""

from __future__ import annotations

_VECTORS = (
    "tid",
    "ntid",
    "ctaid",
    "nctaid",
    "clusterid",
    "nclusterid",
    "cluster_ctaid",
    "cluster_nctaid",
)
_SCALARS = (
    "laneid",
    "warpid",
    "nwarpid",
    "smid",
    "nsmid",
    "gridid",
    "is_explicit_cluster",
    "cluster_ctarank",
    "cluster_nctarank",
    "lanemask_eq",
    "lanemask_le",
    "lanemask_lt",
    "lanemask_ge",
    "lanemask_gt",
    "clock",
    "clock_hi",
    "clock64",
    "globaltimer",
    "globaltimer_lo",
    "globaltimer_hi",
    "reserved_smem_offset_begin",
    "reserved_smem_offset_end",
    "reserved_smem_offset_cap",
    "reserved_smem_offset_0",
    "reserved_smem_offset_1",
    "total_smem_size",
    "aggr_smem_size",
    "dynamic_smem_size",
    "current_graph_exec",
)

SPECIAL_REGISTERS: frozenset[str] = frozenset(
    [f"%{name}" for name in _SCALARS]
    + [f"%{name}{component}" for name in _VECTORS for component in ("", ".x", ".y", ".z", ".w")]
    + [f"%pm{index}{suffix}" for index in range(8) for suffix in ("", "_64")]
    + [f"%envreg{index}" for index in range(32)]
)
"""Every special register as written, components of vector registers included."""
