"""Tiles of Triton's kernels, timed on a GPU: many processes compile candidates, hold each against
what today's tile gives, and time it, one at a time; the best are timed again by turns.

As a program it is one of these processes.
"""

from __future__ import annotations

import fcntl
import json
import math
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import torch

from flashdsa.backends.triton.launch import TILES, Shape, family_of
from flashdsa.bench import attention, indexer, training
from flashdsa.bench.cases import Case, Task
from flashdsa.bench.timer import Call
from workbench.bench import prefill
from workbench.draws.timing import DrawTimer, Protocol
from workbench.draws.two_sources import (
    Inputs,
    Source,
    backward_task,
    forward_task,
    paged_rows,
    window,
)

ROUGH = Protocol("rough", 0.002, 0.008, 1, 0, 0.0, False)
FINE = Protocol("fine", 0.01, 0.03, 2, 0, 0.0, False)
BEST = 4
"""Candidates of a size that are timed again."""
TOLERANCE, SAME_IDS = 1e-2, 0.99
Times = dict[str, dict[str, float]]
"""Microseconds by size and tile."""


def _grid(
    heads: Sequence[int], keys: Sequence[int], warps: Sequence[int], stages: Sequence[int],
    parts: int = 1, registers: int | None = None,
) -> list[Shape]:  # fmt: skip
    return [Shape(*one, parts, registers) for one in product(heads, keys, warps, stages)]


CANDIDATES: dict[str, list[Shape]] = {
    "forward": [
        *_grid((64,), (32, 64), (8,), (1, 2, 3, 5)),
        *_grid((64,), (64,), (8,), (3,), 2),
        *_grid((32,), (32, 64), (4, 8), (2, 3, 5)),
        *_grid((16,), (32, 64, 128), (4, 8), (2, 3)),
    ],
    "forward, few heads": [
        *_grid((64,), (32, 64), (8,), (3, 5)),
        *_grid((16,), (16, 32, 64, 128), (4, 8), (2, 3, 5)),
    ],
    "packed": [
        *_grid((64,), (32, 64), (8,), (1, 2, 3, 5), 4),
        *_grid((32,), (32, 64), (4, 8), (2, 3), 4),
        *_grid((16,), (32, 64, 128), (4, 8), (2, 3), 4),
    ],
    "packed, few heads": [
        *_grid((64,), (32, 64), (8,), (2, 3, 5), 4),
        *_grid((16,), (16, 32, 64, 128), (4, 8), (1, 2, 3), 4),
    ],
    "packed, few heads, fp32 scales": [
        *_grid((64,), (64,), (8,), (2, 3), 4),
        *_grid((16,), (32, 64, 128), (4, 8), (1, 2, 3, 4), 4),
    ],
    "backward": [
        *_grid((64,), (16, 32, 64), (8,), (1, 2, 3)),
        *_grid((16, 32), (16, 32, 64), (4, 8), (2, 3)),
    ],
    "backward of rows": [
        *_grid((16, 32, 64), (64,), (8,), (1, 2, 3)),
        *_grid((16, 32), (16, 32), (4, 8), (1, 2)),
    ],
    "backward of ranges": [
        *_grid((16, 32), (64,), (4, 8), (1, 2, 3)),
        *_grid((64,), (64,), (8,), (1,)),
        *_grid((16, 32), (16, 32), (4, 8), (1, 2)),
    ],
    "scores": [
        *_grid((64,), (64, 128), (4, 8), (2, 3), 4),
        *_grid((64,), (128, 256), (4, 8), (1, 2, 3), 4, registers=128),
    ],
    "scores of prompts": [
        *_grid((64,), (64, 128, 256), (4, 8), (2, 3)),
        *_grid((64,), (128, 256), (4, 8), (2, 3), 2, registers=128),
        *_grid((64,), (128, 256), (4, 8), (2, 3), 4, registers=128),
        *_grid((64,), (128, 256), (8,), (2,), 4),
    ],
    "target": _grid((32, 64, 128), (64, 128, 256), (4, 8), (2, 3)),
    "index scores": _grid((32, 64), (64, 128, 256), (4, 8), (2, 3)),
    "indexer's backward": _grid((32, 64), (32, 64, 128), (4, 8), (1, 2, 3)),
}


class Size(NamedTuple):
    """A call: what makes it, and its case."""

    make: Callable[[Case, str, int, str], Task]
    case: Case


def _packed(case: Case, device: str, seed: int, backend: str) -> Task:
    """Packed rows of `kv_format`, quantised on the CPU."""
    g = torch.Generator().manual_seed(seed)
    ids = attention.draw_ids(case, g).to(device)
    q = torch.randn(case.s, case.h, 512, generator=g).bfloat16().to(device)
    kv = paged_rows(case.s_kv // 64, case.options["kv_format"], g).to(device)
    source = Source(kv, ids, None, None, case.options["kv_format"])
    return forward_task(Inputs(q, [source], None), backend, decodes=False)


def _v32(case: Case, device: str, seed: int, backend: str) -> Task:
    x = attention.make_inputs(case, "cpu", seed)
    moved: Any = (None if one is None else one.to(device) for one in x)
    return attention.forward_task(attention.AttentionInputs(*moved), backend)


def _ranges(case: Case, device: str, seed: int, backend: str) -> Task:
    """The backward over a window of 128 tokens."""
    g = torch.Generator().manual_seed(seed)
    q, kv = (torch.randn(*shape, 512, generator=g).bfloat16().to(device)
             for shape in ((case.s, case.h), (case.s_kv,)))  # fmt: skip
    source = window(kv, torch.arange(1, case.s + 1, device=device), True)
    return backward_task(Inputs(q, [source], None), seed, backend)


def _case(heads: int, queries: int = 1024, **options: Any) -> Case:
    return Case(queries, 16384, heads, 2048, options=options)


def _attends(make: Any, *cases: Case) -> dict[str, Size]:
    return {f"{one.s} queries, {one.h} heads": Size(make, one) for one in cases}


def _packs(heads: int) -> dict[str, Size]:
    return {
        "v4, 64 queries": Size(_packed, _case(heads, 64, kv_format="v4")),
        "v41, 4 queries": Size(_packed, _case(heads, 4, kv_format="v41")),
    }


def _packs_v32(heads: int) -> dict[str, Size]:
    cases = (_case(heads, queries, packed=True) for queries in (4, 64, 512))
    return {f"v32, {one.s} queries": Size(_v32, one) for one in cases}


def _trains(what: str, *heads: int) -> dict[str, Size]:
    return {f"{what}, {h} heads": Size(training.make_training, _case(h, what=what)) for h in heads}


SIZES: dict[str, dict[str, Size]] = {
    "forward": _attends(
        attention.make_forward, _case(128), _case(64), _case(128, 64), _case(128, 4)
    ),
    "forward, few heads": _attends(attention.make_forward, _case(16), _case(16, 64), _case(16, 4)),
    "packed": _packs(128) | _packs_v32(128),
    "packed, few heads": _packs(16),
    "packed, few heads, fp32 scales": _packs_v32(16),
    "backward": _attends(attention.make_backward, _case(128), _case(64), _case(16)),
    "backward of rows": _attends(attention.make_backward, _case(128), _case(64), _case(16)),
    "backward of ranges": _attends(_ranges, _case(128), _case(64), _case(16), _case(64, 64)),
    "scores": {
        "32 rows of 16384": Size(indexer.make_indexer, indexer.indexer_case(32, 16384)),
        "1 row of 131072": Size(indexer.make_indexer, indexer.indexer_case(1, 131072)),
    },
    "scores of prompts": {
        "fp8 prompt": Size(prefill.make_task, Case(2048, 8192, 64, 2048, "fp8")),
        "bf16 prompt": Size(prefill.make_task, Case(2048, 8192, 64, 2048, "bf16")),
    },
    "target": _trains("target", 128, 64, 16),
    "index scores": _trains("scores", 64, 32),
    "indexer's backward": _trains("backward", 64, 32),
}


class Device(NamedTuple):
    """Place of the calls: "cuda", or "cpu", small ones emulated."""

    name: str

    @property
    def capability(self) -> tuple[int, int]:
        """A GPU's, or that of the device that is emulated if none is asked for."""
        return torch.cuda.get_device_capability() if self.name == "cuda" else (8, 0)

    def task(self, kernel: str, name: str) -> Task:
        """The call on its inputs."""
        make, case = SIZES[kernel][name]
        if self.name == "cuda":
            return make(case, "cuda", 0, "triton")
        small = Case(1, 64, min(case.h, 32), 32, case.dtype, case.options)
        return make(small, "cpu", 0, "emulate-triton")

    def call(self, kernel: str, name: str) -> tuple[Call, Any]:
        """The call, and what it gives with today's tile."""
        call = self.task(kernel, name).call
        return call, copied(call())

    def microseconds(self, calls: Mapping[str, Call], protocol: Protocol) -> dict[str, float]:
        """Times of calls by turns, hot."""
        if self.name == "cuda":
            found = DrawTimer(protocol, 0, False).in_turns(calls, "hot", 1)
            return {name: one.median for name, one in found.items()}
        return {name: 1e6 * _seconds(call) for name, call in calls.items()}

    def candidates(self, kernel: str) -> list[Shape]:
        """The grid; emulated, two of it."""
        return CANDIDATES[kernel] if self.name == "cuda" else CANDIDATES[kernel][:2]


def _seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@contextmanager
def tiled(kernel: str, family: str, shape: Shape) -> Iterator[None]:
    """The kernel has this tile inside the block."""
    before = TILES[kernel][family]
    TILES[kernel][family] = shape
    try:
        yield
    finally:
        TILES[kernel][family] = before


def called(kernel: str, family: str, shape: Shape, call: Call) -> Any:
    """Return the result of a call with this tile."""
    with tiled(kernel, family, shape):
        return call()


def difference(found: Any, expected: Any) -> str:
    """Say what is wrong in a result beside another one: norms of floats, few other ids."""
    if isinstance(found, tuple):
        return "; ".join(filter(None, map(difference, found, expected)))
    if not found.is_floating_point():
        same = float((found.sort(-1).values == expected.sort(-1).values).double().mean())
        return "" if same >= SAME_IDS else f"wrong: {1 - same:.1%} of the ids are others"
    a, b = (torch.nan_to_num(one.float(), 0, 0, 0) for one in (found, expected))
    error = float((a - b).norm() / b.norm().clamp(min=1e-30)) if b.numel() else 0.0
    finite = torch.equal(found.isfinite(), expected.isfinite())
    return "" if error <= TOLERANCE and finite else f"wrong: off by {error:.1e}"


def copied(found: Any) -> Any:
    """Results that a later call does not overwrite."""
    return tuple(map(copied, found)) if isinstance(found, tuple) else found.clone()


class Candidate(NamedTuple):
    """A tile that is tried: rough times by size, or what went wrong."""

    us: dict[str, float]
    failed: str = ""


def tried(
    device: Device, kernel: str, shape: Shape, made: Callable[[str, str], tuple[Call, Any]],
    alone: Any,
) -> Candidate:  # fmt: skip
    """A candidate's calls held against today's, and their times, `alone` on the GPU."""
    family, us = family_of(device.capability, kernel), {}
    for name in SIZES[kernel]:
        try:
            call, expected = made(kernel, name)
            if wrong := difference(called(kernel, family, shape, call), expected):
                return Candidate({}, f"{name}: {wrong}")
            with alone():
                timed = {"": partial(called, kernel, family, shape, call)}
                us[name] = device.microseconds(timed, ROUGH)[""]
        except Exception as error:  # compilers and drivers have their own
            line = (str(error).strip().splitlines() or [type(error).__name__])[0][:150]
            return Candidate({}, f"{name}: {line}")
    return Candidate(us)


def measure(kernel: str, device: Device, found: dict[Shape, Candidate]) -> dict[str, Any]:
    """The best candidates of each size again, by turns, beside today's tile."""
    family = family_of(device.capability, kernel)
    usual, times = TILES[kernel][family], {}
    good = {shape: one.us for shape, one in found.items() if not one.failed}
    best = {shape for name in SIZES[kernel]
            for shape in sorted(good, key=lambda shape: good[shape][name])[:BEST]}  # fmt: skip
    for name in SIZES[kernel]:
        call, _ = device.call(kernel, name)
        calls = {
            name_of(shape): partial(called, kernel, family, shape, call)
            for shape in dict.fromkeys([usual, *best])
        }
        times[name] = device.microseconds(calls, FINE)
    return {
        "family": family,
        "today": name_of(usual),
        "us": times,
        "rough_us": {name_of(shape): us for shape, us in good.items()},
        "failed": {name_of(shape): one.failed for shape, one in found.items() if one.failed},
    }


def name_of(shape: Shape) -> str:
    """Heads x keys, warps, stages and, where there are some, parts and registers."""
    more = f", {shape.parts} parts" if shape.parts > 1 else ""
    more += f", {shape.registers} registers" if shape.registers else ""
    return f"{shape.heads}x{shape.keys}, {shape.warps} warps, {shape.stages} stages{more}"


def ranked(us: Times) -> list[tuple[float, str]]:
    """Tiles by the mean of their times over the best of each size."""
    best = {size: min(times.values()) for size, times in us.items()}
    names = next(iter(us.values()), {})
    return sorted(
        (math.exp(sum(math.log(us[size][name] / best[size]) for size in us) / len(us)), name)
        for name in names
    )


class Pool:
    """Processes that try candidates."""

    def __init__(self, device: Device, kernels: Sequence[str], count: int, until: float) -> None:
        """Try all until then."""
        self.found: dict[str, dict[Shape, Candidate]] = {kernel: {} for kernel in kernels}
        self._jobs: queue.SimpleQueue[tuple[str, Shape]] = queue.SimpleQueue()
        for kernel in kernels:
            for shape in device.candidates(kernel):
                self._jobs.put((kernel, shape))
        with tempfile.NamedTemporaryFile() as lock:
            self._arguments = device.name, lock.name
            threads = [threading.Thread(target=self._feed, args=(until,)) for _ in range(count)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        while not self._jobs.empty():
            kernel, shape = self._jobs.get()
            self.found[kernel][shape] = Candidate({}, "not tried: no time left")

    def _feed(self, until: float) -> None:
        """Give one process jobs; one that ends, or is out of time, takes its job with it."""
        worker = self._start(until)
        while time.monotonic() < until:
            try:
                kernel, shape = self._jobs.get_nowait()
            except queue.Empty:
                break
            assert worker.stdin is not None and worker.stdout is not None
            with suppress(BrokenPipeError):
                worker.stdin.write(json.dumps([kernel, *shape]) + "\n")
                worker.stdin.flush()
            if answer := worker.stdout.readline():
                self.found[kernel][shape] = Candidate(*json.loads(answer))
            else:
                ended = Candidate({}, f"its process ended with {worker.wait()}")
                self.found[kernel][shape] = ended
                worker = self._start(until)
        worker.kill()

    def _start(self, until: float) -> subprocess.Popen[str]:
        worker = subprocess.Popen(
            [sys.executable, "-m", "workbench.tiles", *self._arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        timer = threading.Timer(max(1.0, until - time.monotonic()), worker.kill)
        timer.daemon = True
        timer.start()
        return worker


def work(device: Device, lock: str) -> None:
    """Try each candidate that is read."""
    answers = sys.stdout
    sys.stdout = sys.stderr
    made = lru_cache(maxsize=4)(device.call)
    with open(lock, "wb") as file:

        @contextmanager
        def alone() -> Iterator[None]:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)

        for line in sys.stdin:
            kernel, *numbers = json.loads(line)
            found = tried(device, kernel, Shape(*numbers), made, alone)
            answers.write(json.dumps(found) + "\n")
            answers.flush()


if __name__ == "__main__":
    work(Device(sys.argv[1]), sys.argv[2])
