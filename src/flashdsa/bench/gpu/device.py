"""Which GPU and software took part, and its clocks as they are; nothing is changed."""

from __future__ import annotations

import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from flashdsa.bench.versions import versions

_PACKAGES = ("apache-tvm-ffi", "nvidia-cudnn-frontend", "sgl-deep-gemm")
_QUERY = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "temperature.gpu")


def describe_gpu() -> dict[str, Any]:
    """The current CUDA device."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "sms": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "driver": next(iter(_nvidia_smi(("driver_version",)).values()), None),
    }


def clocks() -> dict[str, str]:
    """What nvidia-smi says of clocks (MHz) and temperature now; empty where it fails."""
    return _nvidia_smi(_QUERY)


def gpu_versions() -> dict[str, str | None]:
    """Python, CUDA and every package that can take part; None where it is not installed."""
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return versions() | {"cuda": torch.version.cuda} | found


def _nvidia_smi(query: tuple[str, ...]) -> dict[str, str]:
    index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    options = [f"--query-gpu={','.join(query)}", "--format=csv,noheader,nounits", f"--id={index}"]
    try:
        done = subprocess.run(
            ["nvidia-smi", *options], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.splitlines()[0].split(",")]
    return dict(zip(query, values, strict=False))
