"""Runs small copy kernels."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ptxemu import api
from ptxemu.events import Observer
from ptxemu.sched.policy import Policy

HEADER = """.version 8.8
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 smem[];
"""


def address(array: NDArray[np.generic]) -> int:
    """Where an array lies."""
    return int(array.ctypes.data)


def aligned(size: int) -> NDArray[np.uint8]:
    """Zeros at an address that is a multiple of 128."""
    held = np.zeros(size + 128, np.uint8)
    start = -address(held) % 128
    return held[start : start + size]


def run(
    body: str,
    args: dict[str, NDArray[np.generic] | bytes | int],
    *,
    target: str = "sm_90a",
    registers: str = "",
    smem: int = 4096,
    cluster: int = 1,
    policy: Policy | None = None,
    observer: Observer | None = None,
) -> api.LaunchResult:
    """Run `body` with 32 threads a CTA, the arguments being parameters of their names.

    Predefined registers: %tid, %bar (an mbarrier), %smem, %rank; %p0 is true in the first thread;
    each array's address is in %NAME, each map's in %NAME, each number in %NAME.
    """
    parameters, loads = [], []
    for name, value in args.items():
        if isinstance(value, bytes):
            parameters.append(f".param .align 64 .b8 {name}[128]")
            loads += [f".reg .b64 %{name}; mov.b64 %{name}, {name};"]
            loads += [f"cvta.param.u64 %{name}, %{name};"]
        elif isinstance(value, int):
            parameters.append(f".param .u32 {name}")
            loads += [f".reg .b32 %{name}; ld.param.u32 %{name}, [{name}];"]
        else:
            parameters.append(f".param .u64 {name}")
            loads += [f".reg .b64 %{name}; ld.param.u64 %{name}, [{name}];"]
    ptx = (
        HEADER.format(target=target)
        + f".visible .entry k({', '.join(parameters)})\n"
        + (f".explicitcluster .reqnctapercluster {cluster}, 1, 1\n" if cluster > 1 else "")
        + "{ .reg .b32 %tid, %bar, %smem, %rank, %r<30>; .reg .b64 %rd<10>; .reg .pred %p<10>;\n"
        + ".reg .b16 %h<4>; .shared .align 8 .b64 bar;\n"
        + "mov.u32 %tid, %tid.x; mov.u32 %bar, bar; mov.u32 %smem, smem;\n"
        + "mov.u32 %rank, %cluster_ctarank; setp.eq.u32 %p0, %tid, 0;\n"
        + "\n".join([registers, *loads, body])
        + "\nret; }\n"
    )
    values = [v if isinstance(v, bytes | int) else np.ascontiguousarray(v) for v in args.values()]
    return api.load(ptx).launch(
        "k",
        cluster,
        32,
        args=values,
        smem=smem,
        policy=replace(policy or Policy(), fill=0),
        observer=observer,
    )


LATE = Policy("late", "round_robin")
EAGER = Policy("eager", "round_robin")
