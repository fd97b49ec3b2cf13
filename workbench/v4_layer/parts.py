"""Parts of a layer by flashdsa, each called alone with what it gets in the layer.

A run of the layer records the calls of its parts: arguments, and the gradient that comes back to
the result. A part that calls others counts without them: "entries: the rest" is the compressor
without its projections and `compress_kv`.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flashdsa.integrations.transformers import attention as hook
from flashdsa.integrations.transformers import two_sources
from workbench.v4_layer.layers import Inputs, Layer
from workbench.v4_layer.timing import Call, in_turns

PROJECTIONS, NORMS, ROTATION = "projections of q, kv", "RMSNorm of q, kv", "rotation of q, kv"
ENTRY_PROJECTIONS, ENTRIES, ENTRIES_REST = (
    "entries: projections", "entries: compress_kv", "entries: the rest",
)  # fmt: skip
INDEX_PROJECTIONS, INDEX_SCORES, INDEX_TOPK, INDEX_REST = (
    "index: projections", "index: scores", "index: top-k", "index: keys, the rest",
)  # fmt: skip
LISTS, ATTENTION = "lists and layout", "attention"
OUTPUT_ROTATION, OUTPUT_PROJECTIONS = "rotation of the output", "projections of the output"
PARTS = (
    PROJECTIONS, NORMS, ROTATION, ENTRY_PROJECTIONS, ENTRIES, ENTRIES_REST, INDEX_PROJECTIONS,
    INDEX_SCORES, INDEX_TOPK, INDEX_REST, LISTS, ATTENTION, OUTPUT_ROTATION, OUTPUT_PROJECTIONS,
)  # fmt: skip
"""In the order of their work."""


@dataclass(eq=False)
class Span:
    """A recorded call.

    Attributes:
        parent: the recorded call that it is a part of. owner: of the parameters, if a module.
        gradient: of its result; None: none came.
    """

    part: str
    function: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    owner: nn.Module | None
    parent: Span | None
    gradient: Tensor | None = None


class Recorder:
    """Records calls while `recording` has its functions in place of the layer's."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._open: list[Span] = []

    def wrap(self, part: str, owner: Any, name: str) -> Callable[..., Any]:
        """The function `name` of `owner`, recorded."""
        function = getattr(owner, name)
        module = owner if isinstance(owner, nn.Module) else None

        def recorded(*args: Any, **options: Any) -> Any:
            parent = self._open[-1] if self._open else None
            named = self._named(part, parent)
            if named is None:
                return function(*args, **options)
            again = _with_entries(function, args[0]) if part == LISTS else function
            span = Span(named, again, (args, options), module, parent)
            self.spans.append(span)
            self._open.append(span)
            found = again(*args, **options)
            self._open.pop()
            result = first_tensor(found)
            if result.requires_grad:
                result.register_hook(partial(setattr, span, "gradient"))
            return found

        return recorded

    def _named(self, part: str, parent: Span | None) -> str | None:
        """The part, where the same function serves several; None of a rotation inside another."""
        if part != ROTATION:
            return part
        if parent is not None:
            return None
        attended = any(span.part == LISTS for span in self.spans)
        return OUTPUT_ROTATION if attended else ROTATION


def record(layer: Layer, inputs: Inputs) -> list[Span]:
    """The calls of one forward and backward."""
    recorder = Recorder()
    with ExitStack() as stack:
        for part, owner, name in _places(layer.attention):
            stack.enter_context(patch.object(owner, name, recorder.wrap(part, owner, name)))
        layer.train(inputs.hidden, inputs.gradient)
    return recorder.spans


def _places(attention: Any) -> Iterator[tuple[str, Any, str]]:
    """(part, owner, name) of every function to record."""
    compressor = attention.compressor
    indexer = getattr(compressor, "indexer", None)
    modules: dict[str, list[Any]] = {
        PROJECTIONS: [attention.q_a_proj, attention.q_b_proj, attention.kv_proj],
        NORMS: [attention.q_a_norm, attention.q_b_norm, attention.kv_norm],
        OUTPUT_PROJECTIONS: [attention.o_a_proj, attention.o_b_proj],
    }
    if compressor is not None:
        modules[ENTRY_PROJECTIONS] = [compressor.kv_proj, compressor.gate_proj]
        modules[ENTRIES_REST] = [compressor]
    if indexer is not None:
        modules[INDEX_PROJECTIONS] = [indexer.kv_proj, indexer.gate_proj, indexer.q_b_proj]
        modules[INDEX_SCORES], modules[INDEX_REST] = [indexer.scorer], [indexer]
        yield INDEX_TOPK, torch.Tensor, "topk"
    for part, owners in modules.items():
        for owner in owners:
            yield part, owner, "forward"
    yield ROTATION, sys.modules[type(attention).__module__], "apply_rotary_pos_emb"
    yield ENTRIES, two_sources, "compress_kv"
    yield LISTS, hook, "attend"
    yield ATTENTION, two_sources, "sparse_mla"


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
    result = first_tensor(forward())

    def backward() -> object:
        return torch.autograd.grad(
            result, wanted, span.gradient, retain_graph=True, allow_unused=True
        )

    return forward, backward


def time_parts(
    spans: list[Span], device: str, repeats: int, seed: int
) -> dict[str, tuple[float, float]]:
    """Microseconds of each part, forward and backward, without the parts inside it."""
    calls: dict[tuple[Span, int], Call] = {}
    for span in spans:
        for direction, call in enumerate(replays(span)):
            if call is not None:
                calls[span, direction] = call
    found = in_turns(calls, device, repeats, seed)
    sums: defaultdict[tuple[str, int], float] = defaultdict(float)
    for (span, direction), times in found.items():
        us = times.device.median
        sums[span.part, direction] += us
        if span.parent is not None:
            sums[span.parent.part, direction] -= us
    parts = {span.part for span in spans}
    return {part: (sums[part, 0], sums[part, 1]) for part in PARTS if part in parts}
