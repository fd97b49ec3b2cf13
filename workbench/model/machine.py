"""The rates and latencies of a GPU, each with its source; none belongs to a kernel.

MEASURED: on the H200 by this project's probes. PUBLISHED: a data sheet or a paper. ASSUMED: nobody
here measured it; the source says what it rests on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple


class Constant(NamedTuple):
    """A number with its meaning, unit, the trust that it deserves, and its source."""

    value: float
    what: str
    unit: str
    basis: str
    source: str


@dataclass(frozen=True)
class GpuModel:
    """One GPU. Rates of an SM are per clock, rates of the chip per second."""

    name: str
    constants: Mapping[str, Constant]

    def __getitem__(self, name: str) -> float:
        return self.constants[name].value

    def with_values(self, values: Mapping[str, float]) -> GpuModel:
        """Put other values in place of some constants."""
        changed = {name: self.constants[name]._replace(value=new) for name, new in values.items()}
        return replace(self, constants={**self.constants, **changed})


M, P, A = "measured", "published", "assumed"
_PROBE = "a probe of one H200, 2026-11-20"
_STREAM = "a stream and its clock on one H200, 2026-11-20"
_PAPER = "Luo et al., Benchmarking and Dissecting the Nvidia Hopper GPU (arXiv 2402.13499)"
_GUIDE = "CUDA C++ Programming Guide, arithmetic throughput, compute capability 9.0 and 10.0"
_SHEET = "NVIDIA B200 data sheet: 2.25 PFLOPS dense bf16, 4.5 dense fp8, 8 TB/s"
_CHIPS = "chipsandcheese.com, B200"
_CARRIED = "carried over from the H200"
_ORDER = "the order of magnitude of the latencies beside it; nobody measured it"
_SM, _CLK, _S, _INSTRUCTIONS = "B/clk/SM", "clk", "B/s", "warp instructions/clk/SM"
_FLOP = "FLOP/clk/SM"

_Known = tuple[float, str, str]
_CONSTANTS: dict[str, tuple[str, str, _Known, _Known]] = {
    "sms": ("streaming multiprocessors", "", (132, M, _STREAM), (148, P, _CHIPS)),
    "clock": ("of the SMs", "1/s", (1.98e9, M, _STREAM), (1.85e9, P, "148 SMs; " + _SHEET)),
    "bf16_rate": ("dense", _FLOP, (4096, M, "m64nNk16; " + _PROBE), (8192, P, _SHEET)),
    "fp8_rate": ("dense", _FLOP, (8192, M, "1785 TFLOPS; " + _PROBE), (16384, P, _SHEET)),
    "operand_rate": (
        "shared memory, to MMAs and all others", _SM, (128, M, "m64n32k16 SS; " + _PROBE),
        (128, P, "SS with N < 128 (SemiAnalysis, Dissecting Blackwell)"),
    ),
    "bulk_read_rate": (
        "of shared memory's time for bulk copies and adds", _SM,
        (32, M, "beside wgmma; " + _PROBE), (32, A, _CARRIED),
    ),
    "dsmem_starved": (
        "share of st.async beside saturated MMAs", "", (5.5 / 19.7, M, _PROBE),
        (5.5 / 19.7, A, _CARRIED),
    ),
    "bulk_starved": ("of bulk reads", "", (0.84 / 25, M, _PROBE), (0.84 / 25, A, _CARRIED)),
    "dsmem_rate": ("st.async into the peer", _SM, (19.7, M, _PROBE), (19.7, A, _CARRIED)),
    "tmem_rate": (
        "loads and stores of tensor memory", _SM, (0, P, "Hopper has none"),
        (512, A, "four warps of 32 lanes of 4 bytes a clock"),
    ),
    "store_rate": ("32 bytes a lane", _SM, (32, A, "a sector a clock"), (32, A, _CARRIED)),
    "issue_rate": ("instructions", _INSTRUCTIONS, (4, P, _GUIDE), (4, P, _GUIDE)),
    "exp_rate": ("ex2", "1/clk/SM", (16, P, _GUIDE), (16, P, _GUIDE)),
    "l2_read": ("resident", _S, (8.9e12, M, _PROBE), (9.32e12, A, "34 B/clk/SM as on the H200")),
    "l2_reduce": (
        "adds, resident", _S, (3.714e12, M, "8,192 rows of 2304 bytes; " + _PROBE),
        (3.89e12, A, "14.2 B/clk/SM as on the H200"),
    ),
    "reduce_miss": (
        "adds, not resident", _S, (1.29e12, M, "32,768 and 131,072 rows; " + _PROBE),
        (2.3e12, A, "the H200's share of its HBM"),
    ),
    "hbm": ("device memory", _S, (4.47e12, M, _STREAM), (8e12, P, _SHEET)),
    "l2_bytes": ("capacity", "B", (50e6, P, "NVIDIA H100 white paper"), (126e6, P, _CHIPS)),
    "shared_latency": ("a load of shared memory", _CLK, (29, P, _PAPER), (29, A, _CARRIED)),
    "barrier_latency": ("a barrier or an mbarrier", _CLK, (60, A, _ORDER), (60, A, _ORDER)),
    "mma_latency": ("an MMA's end, seen by a warp", _CLK, (120, A, _ORDER), (120, A, _ORDER)),
    "dsmem_latency": ("a write seen by the peer", _CLK, (180, P, _PAPER), (300, A, _ORDER)),
    "l2_latency": ("a load that hits L2", _CLK, (297, P, _PAPER), (277, A, "the H200's 150 ns")),
    "hbm_latency": ("a load that misses", _CLK, (540, P, _PAPER), (505, A, "the H200's 273 ns")),
    "release_latency": (
        "a fence of device scope after the CTA's writes", _CLK,
        (1500, M, "workbench/results/indexer/NOTES.md"), (1500, A, _CARRIED),
    ),
    "launch": (
        "events around an empty kernel", "s", (4.0e-6, M, "3.9 to 4.1 us, one H200"),
        (4.0e-6, A, _CARRIED),
    ),
}  # fmt: skip


def _model(name: str, column: int) -> GpuModel:
    """Take the constants of one column, 0 or 1."""
    found = {}
    for key, (what, unit, *columns) in _CONSTANTS.items():
        value, basis, source = columns[column]
        found[key] = Constant(value, what, unit, basis, source)
    return GpuModel(name, found)


H200, B200 = _model("H200", 0), _model("B200", 1)
