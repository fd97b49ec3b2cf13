"""Run the suite's programs in ptxemu and compare with recordings; no pytest in here."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.silicon.programs.case import (
    SAMPLES,
    Array,
    Bytes,
    Check,
    Im2colMap,
    Program,
    TensorMap,
    condense,
)

import ptxemu.api
from ptxemu.descriptors import tensor_map as tensor_maps
from ptxemu.descriptors.tensor_map import DRIVER_TYPES, Swizzle, encode_tiled
from ptxemu.memory.global_memory import GlobalMemory
from ptxemu.sched.policy import Policy

MANTISSA = {"f16": 10, "bf16": 7, "f32": 23, "f64": 52}
LOWEST_EXPONENT = {"f16": -14, "bf16": -126, "f32": -126, "f64": -1022}


def run(program: Program, policy: Policy | None = None) -> list[Bytes]:
    """Launch once in ptxemu; the recorded arrays."""
    buffers = {i: _aligned(a.data) for i, a in enumerate(program.args) if isinstance(a, Array)}
    memory = GlobalMemory()
    for i, buffer in buffers.items():
        memory.register(buffer, f"argument {i}")
    args: list[Any] = []
    for i, arg in enumerate(program.args):
        if isinstance(arg, TensorMap):
            args.append(encode(arg, buffers[arg.array].ctypes.data))
        else:
            args.append(buffers.get(i, arg))
    ptxemu.api.load(program.ptx).launch(
        "k",
        program.grid,
        program.block,
        args=args,
        cluster=program.cluster if program.cluster > 1 else None,
        smem=program.smem,
        memory=memory,
        policy=policy,
    )
    return [buffers[i] for i in program.outputs]


def encode(m: TensorMap, address: int) -> bytes:
    """The map as ptxemu encodes it."""
    if isinstance(m, Im2colMap):
        return tensor_maps.Im2colMap(
            address, DRIVER_TYPES[m.dtype], m.dims, m.strides, (m.channels,), m.steps,
            m.interleave, Swizzle(m.swizzle), m.l2_promotion, m.oob_fill, m.lower, m.upper,
            m.pixels,
        ).encode()  # fmt: skip
    return encode_tiled(
        m.dtype, address, m.dims, m.strides, m.box, m.steps, m.interleave, m.swizzle,
        m.l2_promotion, m.oob_fill,
    )  # fmt: skip


def _aligned(data: Bytes) -> Bytes:
    """A copy that starts on a multiple of 1024 bytes, as on the GPU."""
    room = np.zeros(len(data) + 1024, np.uint8)
    start = -room.ctypes.data % 1024
    copy = room[start : start + len(data)]
    copy[:] = data
    return copy


def differences(program: Program, emulated: list[Bytes], recorded: list[bytes]) -> list[str]:
    """What disagrees, in words; empty if nothing."""
    found = []
    for index, (result, expected) in enumerate(zip(emulated, recorded, strict=True)):
        mine = condense(result, program.check)
        if mine == expected:
            continue
        if len(mine) != len(expected):
            found.append(f"result {index}: {len(mine)} bytes for {len(expected)}")
        elif program.check.exact:
            found.append(f"result {index}: {_exact_difference(result, mine, expected)}")
        else:
            text = _close_difference(program.check, mine, expected)
            found += [f"result {index}: {text}"] if text else []
    return found


def _exact_difference(result: Bytes, mine: bytes, expected: bytes) -> str:
    if len(mine) < len(result):  # a digest, then samples
        mine, expected = mine[32:], expected[32:]
        prefix = f"digest; of {SAMPLES} samples "
    else:
        prefix = ""
    a, b = (np.frombuffer(x, np.uint8) for x in (mine, expected))
    step = 4 if len(a) % 4 == 0 else 2 if len(a) % 2 == 0 else 1
    x, y = a.view(f"u{step}"), b.view(f"u{step}")
    bad = np.flatnonzero(x != y)
    shown = ", ".join(f"[{i}] {x[i]:#x} for {y[i]:#x}" for i in bad[:4])
    return f"{prefix}{len(bad)} of {len(x)} words ({step} bytes) differ: {shown}"


def floats(data: bytes, dtype: str) -> NDArray[np.float64]:
    """Values of a float type."""
    if dtype == "bf16":
        words = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
        return words.view(np.float32).astype(np.float64)
    return np.frombuffer(data, f"f{8 if dtype == 'f64' else 4 if dtype == 'f32' else 2}").astype(
        np.float64
    )


def errors(check: Check, mine: bytes, expected: bytes) -> NDArray[np.float64]:
    """Each element's difference as a share of what is allowed; infinite where none helps."""
    x, y = floats(mine, check.dtype), floats(expected, check.dtype)
    with np.errstate(all="ignore"):
        exponent = np.frexp(np.where(np.isfinite(y), y, 1.0))[1] - 1
        exponent = np.maximum(exponent, LOWEST_EXPONENT[check.dtype])
        unit = np.ldexp(1.0, exponent - MANTISSA[check.dtype])
        allowed = np.maximum(check.ulp * unit, check.absolute)
        allowed = np.maximum(allowed, check.relative * np.abs(np.where(np.isfinite(y), y, 0.0)))
        share = np.abs(x - y) / np.where(allowed > 0, allowed, 1e-300)
    words = (np.frombuffer(data, f"u{len(data) // len(x)}") for data in (mine, expected))
    same = (x == y) | np.equal(*words)
    return np.where(same, 0.0, np.where(np.isfinite(x) & np.isfinite(y), share, np.inf))


def _close_difference(check: Check, mine: bytes, expected: bytes) -> str:
    share = errors(check, mine, expected)
    bad = np.flatnonzero(~(share <= 1.0))
    if not len(bad):
        return ""
    x, y = floats(mine, check.dtype), floats(expected, check.dtype)
    shown = ", ".join(f"[{i}] {x[i]:.9g} for {y[i]:.9g} ({share[i]:.3g}x)" for i in bad[:4])
    return f"{len(bad)} of {len(x)} beyond the bound: {shown}"
