"""Cases as data, and what an operation makes of one: a call, its work, its judge, its ceiling."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.bench.timer import Call
from flashdsa.problem import D_QK

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
SIZES = ("s", "s_kv", "h", "topk", "dtype")
READ_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}


@dataclass(frozen=True)
class Case:
    """One call to time. Indexer and top-k read `s` as their batch, `s_kv` as its length.

    Attributes:
        options: what else the operation reads: each says what it knows.
        name: by default, the sizes.
    """

    s: int = 16
    s_kv: int = 8192
    h: int = 128
    topk: int = 2048
    dtype: str = "bfloat16"
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    @property
    def label(self) -> str:
        """The name of its row, unique within an operation."""
        sizes = f"S={self.s} S_kv={self.s_kv} H={self.h} topk={self.topk} {self.dtype}"
        return self.name or sizes

    @property
    def problem(self) -> dict[str, Any]:
        """Sizes and options, as JSON has them."""
        options = {k: list(v) if isinstance(v, tuple) else v for k, v in self.options.items()}
        return {size: getattr(self, size) for size in SIZES} | options

    def quick(self) -> Case:
        """The same, cut down to what takes a second; heads stay: a GPU may lack other kernels."""
        options = dict(self.options)
        if "lengths" in options:
            options["lengths"] = tuple(min(n, 1024) for n in options["lengths"][:4])
        small = {"s": 4, "s_kv": 1024, "topk": 256}
        sizes: Any = {name: min(getattr(self, name), most) for name, most in small.items()}
        return replace(self, options=options, **sizes)


class Ceiling(NamedTuple):
    """The plainest code of the same kind, timed by turns with the operation."""

    name: str
    work: float
    unit: str
    call: Call


class Verdict(NamedTuple):
    """Errors of a result's norms against float64, and what is wrong with it in words."""

    errors: dict[str, float]
    findings: list[str]


@dataclass(frozen=True)
class Task:
    """A case with its inputs made.

    Attributes:
        call: ours; `judge` takes what it returns. work: of a call, in the ceiling's unit.
        inputs: the operands, for peers.
        exact: a later call must give the same tensor, bit for bit.
    """

    call: Call
    judge: Callable[[Any], Verdict]
    work: float
    ceiling: Ceiling
    inputs: Any
    exact: bool = False


Make = Callable[[Case, str, int, str], Task]
"""(case, device, seed, backend) -> its task."""


@dataclass(frozen=True)
class Operation:
    """An operation that can be timed.

    Attributes:
        cases: the default ones, by device ("cpu", "cuda").
        conditions: on a GPU; the wall clock knows "hot" alone.
    """

    name: str
    make: Make
    cases: Mapping[str, Sequence[Case]]
    conditions: tuple[str, ...] = ("hot", "cold")


def judge_errors(errors: Mapping[str, tuple[float, float]]) -> Verdict:
    """The verdict on (error, limit) by output; an error that is no number is over any limit."""
    findings = [
        f"{name} is off by {error:.2e} of its norm, {limit:.0e} allowed"
        for name, (error, limit) in errors.items()
        if not error <= limit
    ]
    finite = {name: error for name, (error, _) in errors.items() if math.isfinite(error)}
    return Verdict(finite, findings)


def judged_queries(count: int) -> list[int]:
    """Four from the first to the last one."""
    return sorted({part * (count - 1) // 3 for part in range(4)})


def norm_error(found: Tensor, expected: Tensor) -> float:
    """The error's norm over the result's, in float64."""
    expected = expected.to(found.device, torch.float64)
    return float((found.double() - expected).norm() / expected.norm())


def poison(found: Any) -> None:
    """Overwrite a call's results, so that the next call's are seen to be written.

    A call that allocates its results gets the same memory again.
    """
    if isinstance(found, Tensor):
        found.detach().fill_(math.nan if found.is_floating_point() else -99)
    elif isinstance(found, list | tuple):
        for one in found:
            poison(one)


def worst(errors: Sequence[float]) -> float:
    """The largest; nan where one is nan."""
    return math.nan if any(map(math.isnan, errors)) else max(errors)


@lru_cache(maxsize=2)
def products_ceiling(device: str) -> Ceiling:
    """torch.matmul: on a CPU of the forward's own tile in fp32, on a GPU of squares in bf16."""
    m, k, n = (4096, 4096, 4096) if device == "cuda" else (128, D_QK, 2048)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    left, right = (torch.randn(size, device=device).to(dtype) for size in ((m, k), (k, n)))
    name = f"torch.matmul {m}x{k}x{n} {str(dtype).removeprefix('torch.')}"
    return Ceiling(name, 2.0 * m * k * n, "FLOP", partial(torch.matmul, left, right))


@lru_cache(maxsize=2)
def reading_ceiling(device: str) -> Ceiling:
    """torch.sum of a buffer above any cache."""
    buffer = torch.zeros(READ_BYTES[device] // 4, device=device)
    name = f"torch.sum of {READ_BYTES[device] >> 20} MiB"
    return Ceiling(name, float(READ_BYTES[device]), "B", buffer.sum)
