"""Description of this machine: CPU, memory, GPUs, clocks, versions; as plain data for reports."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """One CUDA device as torch sees it; the clocks come from nvidia-smi where it is there."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None


@dataclass(frozen=True)
class HostMachine:
    """The hardware under a measurement. Unknown values are None."""

    cpu: str
    logical_cores: int
    physical_cores: int | None
    memory_bytes: int
    cpu_clock_mhz: int | None
    system: str
    gpus: tuple[Gpu, ...]

    def slug(self) -> str:
        """A folder name for this machine: its GPUs if it has any, else its CPU and cores."""
        name = f"{len(self.gpus)}x-{self.gpus[0].name}" if self.gpus else self.cpu
        name = name.removeprefix("1x-")
        words = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", name.lower())).strip("-")
        return words if self.gpus else f"{words}-{self.logical_cores}c"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def describe_machine() -> HostMachine:
    """This machine. Imports torch, to ask it for GPUs."""
    return HostMachine(
        cpu=_cpu_name(),
        logical_cores=os.cpu_count() or 1,
        physical_cores=_physical_cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        cpu_clock_mhz=_cpu_clock_mhz(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        gpus=_gpus(),
    )


def _cpu_name() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", _cpuinfo_text(), re.MULTILINE)
    if match:
        return " ".join(match.group(1).split())
    module = _optional("cpuinfo")  # ARM has no "model name" line; py-cpuinfo knows the parts
    brand = module.get_cpu_info().get("brand_raw") if module else None
    return str(brand or platform.processor() or platform.machine())


def _cpu_clock_mhz() -> int | None:
    match = re.search(r"^cpu MHz\s*:\s*([\d.]+)$", _cpuinfo_text(), re.MULTILINE)
    return round(float(match.group(1))) if match else None


def _cpuinfo_text() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _physical_cores() -> int | None:
    module = _optional("psutil")
    count = module.cpu_count(logical=False) if module else None
    return int(count) if count else None


def _optional(name: str) -> Any:
    """A module of the [bench] extra, or None where it is not installed."""
    try:
        return import_module(name)
    except ImportError:
        return None


def _gpus() -> tuple[Gpu, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    clocks = _gpu_clocks_mhz()
    found = []
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        now, highest = clocks[i] if i < len(clocks) else (None, None)
        capability = (properties.major, properties.minor)
        found.append(Gpu(properties.name, capability, properties.total_memory, now, highest))
    return tuple(found)


def _gpu_clocks_mhz() -> list[tuple[int | None, int | None]]:
    """(current, highest) SM clock of every GPU; empty where nvidia-smi fails."""
    rows = _nvidia_smi("clocks.sm", "clocks.max.sm")
    return [(_int_or_none(now), _int_or_none(highest)) for now, highest in rows]


def clocks(gpu: int = 0) -> dict[str, str]:
    """Driver, clocks (MHz) and temperature of a GPU now; empty where nvidia-smi fails."""
    query = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "temperature.gpu")
    rows = _nvidia_smi(*query)
    return dict(zip(query, rows[gpu], strict=False)) if gpu < len(rows) else {}


def _nvidia_smi(*query: str) -> list[list[str]]:
    """A row of values for each GPU; none where nvidia-smi is missing or fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(query)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[value.strip() for value in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == len(query)]


def _int_or_none(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


PACKAGES = ("flashdsa", "torch", "triton", "numpy", "nvidia-cutlass-dsl")


def versions(*more: str) -> dict[str, str | None]:
    """Version of Python, of each of PACKAGES and of `more`; None where one is not installed."""
    names = (*PACKAGES, *more)
    return {"python": platform.python_version()} | {name: _version(name) for name in names}


def _version(package: str) -> str | None:
    if package == "flashdsa":
        import flashdsa

        return flashdsa.__version__
    try:
        return version(package)
    except PackageNotFoundError:
        return None
