"""Parts of a layer by flashdsa, each called alone with what it gets in the layer.

A run of the layer records the calls of its parts: arguments, and the gradient that comes back to
the result. A part that calls others counts without them: "entries: the rest" is the compressor
without its projections and `compress_kv`.

Times are by turns in random order: on a GPU between CUDA events, without CUDA graphs.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flashdsa.bench.timer import Times
from flashdsa.integrations.transformers import attention as hook
from flashdsa.integrations.transformers import two_sources
from workbench.v4_layer.layers import Inputs, Layer

ROTATION, OUTPUT_ROTATION, LISTS = "rotation of q, kv", "output rotation", "lists and layout"
MODULES = {
    "projections of q, kv": ("q_a_proj", "q_b_proj", "kv_proj"),
    "RMSNorm of q, kv": ("q_a_norm", "q_b_norm", "kv_norm"),
    "entries: projections": ("compressor.kv_proj", "compressor.gate_proj"),
    "entries: the rest": ("compressor",),
    "index: projections": tuple(
        f"compressor.indexer.{name}_proj" for name in ("kv", "gate", "q_b")
    ),
    "index: scores": ("compressor.indexer.scorer",),
    "index: keys, the rest": ("compressor.indexer",),
    "output projections": ("o_a_proj", "o_b_proj"),
}
"""Modules of each part, by their names in the attention; a layer has some of them."""
FUNCTIONS: dict[str, tuple[Any, str]] = {
    "entries: compress_kv": (two_sources, "compress_kv"),
    "index: top-k": (torch.Tensor, "topk"),
    LISTS: (hook, "attend"),
    "attention": (two_sources, "sparse_mla"),
}
"""Parts that are functions: owner and name."""
PARTS = (
    "projections of q, kv", "RMSNorm of q, kv", ROTATION, "entries: projections",
    "entries: compress_kv", "entries: the rest", "index: projections", "index: scores",
    "index: top-k", "index: keys, the rest", LISTS, "attention", OUTPUT_ROTATION,
    "output projections",
)  # fmt: skip
"""In the order of their work."""


@dataclass(eq=False)
class Span:
    """A recorded call.

    Attributes:
        owner: of the parameters, if it is a module. parent: the recorded call that it is a part of.
        gradient: of its result; None: none came.
    """

    part: str
    function: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    owner: nn.Module | None
    parent: Span | None
    gradient: Tensor | None = None


def record(layer: Layer, inputs: Inputs) -> list[Span]:
    """The calls of one forward and backward."""
    spans: list[Span] = []
    inside: list[Span] = []
    with ExitStack() as stack:
        for part, owner, name in _places(layer.attention):
            recorded = _recorded(part, owner, getattr(owner, name), spans, inside)
            stack.enter_context(patch.object(owner, name, recorded))
        layer.train(inputs.hidden, inputs.gradient)
    return spans


def _places(attention: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """(part, owner, name) of every function to record."""
    modules = dict(attention.named_modules())
    for part, names in MODULES.items():
        for name in names:
            if name in modules:
                yield part, modules[name], "forward"
    for part, (owner, name) in FUNCTIONS.items():
        yield part, owner, name
    yield ROTATION, sys.modules[type(attention).__module__], "apply_rotary_pos_emb"


def _recorded(
    part: str, owner: Any, function: Callable[..., Any], spans: list[Span], inside: list[Span]
) -> Callable[..., Any]:
    """The function of a part, which adds its calls to `spans`; `inside` are the open ones."""
    module = owner if isinstance(owner, nn.Module) else None

    def recorded(*args: Any, **options: Any) -> Any:
        named, again = part, function
        if part == ROTATION and inside:  # index queries and keys, of another part
            return function(*args, **options)
        if part == ROTATION and any(span.part == LISTS for span in spans):
            named = OUTPUT_ROTATION
        if part == LISTS:
            again = _with_entries(function, args[0])
        span = Span(named, again, (args, options), module, inside[-1] if inside else None)
        spans.append(span)
        inside.append(span)
        found = again(*args, **options)
        inside.pop()
        result = first_tensor(found)
        if result.requires_grad:
            result.register_hook(partial(setattr, span, "gradient"))
        return found

    return recorded


def _with_entries(attend: Callable[..., Any], attention: nn.Module) -> Callable[..., Any]:
    """`attend`, which finds the entries that its first call takes away in every later call."""
    entries = attention.__dict__.get(two_sources.ENTRIES)

    def again(*args: Any) -> Any:
        if entries is not None:
            setattr(attention, two_sources.ENTRIES, entries)
        return attend(*args)

    return again


def first_tensor(result: Any) -> Tensor:
    """The result, or the first one of several."""
    return result if isinstance(result, Tensor) else first_tensor(result[0])


def replays(span: Span) -> tuple[Call, Call | None]:
    """The call again, and its backward; None where no gradient comes."""
    leaves: dict[int, Tensor] = {}

    def leaf(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return leaves.setdefault(id(x), x.detach().requires_grad_(x.requires_grad))

    args, options = pytree.tree_map(leaf, span.arguments)
    forward = partial(span.function, *args, **options)
    if span.gradient is None:
        return forward, None
    wanted = [x for x in leaves.values() if x.requires_grad]
    wanted += [] if span.owner is None else span.owner.parameters()
    return forward, partial(
        torch.autograd.grad, first_tensor(forward()), wanted, span.gradient,
        retain_graph=True, allow_unused=True,
    )  # fmt: skip


def time_parts(
    spans: list[Span], device: str, repeats: int, seed: int
) -> dict[str, tuple[float, float]]:
    """Microseconds of each part, forward and backward, without the parts inside it."""
    calls = {
        (span, direction): call
        for span in spans
        for direction, call in enumerate(replays(span))
        if call is not None
    }
    sums = {span.part: [0.0, 0.0] for span in spans}
    for (span, direction), times in in_turns(calls, device, repeats, seed).items():
        sums[span.part][direction] += times.device.median
        if span.parent is not None:
            sums[span.parent.part][direction] -= times.device.median
    return {part: (sums[part][0], sums[part][1]) for part in PARTS if part in sums}


Call = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)
WARMUP_CALLS = 3
CYCLES_A_SECOND = 2e9
"""An H200's clock, about: a spinning kernel counts cycles."""
SPIN_SECONDS, TRIES = 2e-4, 4

PROTOCOL = (
    f"{WARMUP_CALLS} warm-up calls each; by turns in random order; a sample is two calls: event, "
    "call, event on an idle GPU (elapsed), then, caches hot, a spinning kernel, event, call, event "
    "with the host ahead (device); host: until that call has queued its work; no graphs; medians; "
    "on a CPU the wall clock of one call"
)


@dataclass(frozen=True)
class Measured:
    """Microseconds of a call.

    Attributes:
        device: on the GPU, which waits for nothing; on a CPU, of the call.
        elapsed: on a GPU that was idle: it waits for the host, too. host: until the host goes on.
            None on a CPU.
    """

    device: Times
    elapsed: Times | None = None
    host: Times | None = None


def in_turns(
    calls: Mapping[Name, Call], device: str, repeats: int, seed: int
) -> dict[Name, Measured]:
    """Times of the calls, `repeats` samples of each."""
    draw = random.Random(seed)
    sample = _on_gpu if device == "cuda" else _on_cpu
    for call in calls.values():
        for _ in range(WARMUP_CALLS):
            call()
    samples: dict[Name, list[tuple[float, ...]]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name in draw.sample(list(calls), len(calls)):
            samples[name].append(sample(calls[name]))
    return {name: _measured(taken) for name, taken in samples.items()}


def _measured(samples: list[tuple[float, ...]]) -> Measured:
    late, device, *others = (list(column) for column in zip(*samples, strict=True))
    return Measured(Times.of(device, int(sum(late))), *(Times.of(us) for us in others))


def _on_cpu(call: Call) -> tuple[float, ...]:
    return 0, 1e6 * _seconds(call)


def _on_gpu(call: Call) -> tuple[float, ...]:
    """Whether the host was late, and microseconds: device, elapsed, host. Waits for the GPU only
    where no event's time runs.

    The host is ahead if the GPU still spins when all is queued; if not, it spins longer.
    """
    spin = SPIN_SECONDS
    for _ in range(TRIES):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        torch.cuda.synchronize()
        events[0].record()
        spin += 2 * _seconds(call)
        events[1].record()
        torch.cuda._sleep(round(CYCLES_A_SECOND * spin))
        events[2].record()
        host = _seconds(call)
        events[3].record()
        is_late = events[2].query()
        torch.cuda.synchronize()
        if not is_late:
            break
    device, elapsed = (1e3 * events[at].elapsed_time(events[at + 1]) for at in (2, 0))
    return is_late, device, elapsed, 1e6 * host


def _seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
