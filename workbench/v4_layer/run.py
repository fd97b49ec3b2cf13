"""Whole layers and their parts, judged and timed; the document that results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch

from flashdsa.bench.checkout import find_checkout
from flashdsa.bench.machine import clocks, describe_machine, versions
from workbench.v4_layer.layers import EAGER, OURS, Error, Inputs, Layer, build, judge
from workbench.v4_layer.parts import PROTOCOL, Call, Measured, in_turns, record, time_parts

SCHEMA = "flashdsa-v4-layer/1"
FORWARD, BOTH = "forward", "forward and backward"
COMPILED = {OURS: "flashdsa compiled", EAGER: "torch compiled"}
"""Under torch.compile, by what is compiled."""


Pair = tuple[float, float]
"""Forward and backward."""


@dataclass(frozen=True)
class KindOfLayer:
    """Times and errors of a kind of layer.

    Attributes:
        wholes: by contender and `FORWARD` or `BOTH`. missing: why a contender has no time.
        parts: microseconds of each, forward and backward.
        errors: of the output and of gradients.
    """

    wholes: dict[str, dict[str, Measured]]
    parts: dict[str, Pair]
    errors: dict[str, Error]
    missing: dict[str, str]

    @property
    def findings(self) -> list[str]:
        """Errors that are too large, in words."""
        return [
            f"{name} of ours is off by {error.ours:.1e} of its norm, eager's by {error.eager:.1e}"
            for name, error in self.errors.items()
            if not error.is_allowed
        ]

    def worst(self, contender: str) -> str:
        """The largest error, in words; none of a contender that was not judged."""
        errors = {OURS: [x.ours for x in self.errors.values()]}
        errors[EAGER] = [x.eager for x in self.errors.values()]
        return f"{max(errors[contender]):.1e}" if contender in errors else ""

    def whole(self, clock: str) -> Pair | None:
        """Microseconds of our layer by a clock of `Measured`; None on a CPU, which has one."""
        forward, both = (getattr(self.wholes[OURS][what], clock) for what in (FORWARD, BOTH))
        return forward and (forward.median, both.median - forward.median)

    def remainder(self) -> Pair:
        """Microseconds of the layer that no part has."""
        whole = self.whole("device")
        assert whole is not None
        forward, backward = (sum(times) for times in zip(*self.parts.values(), strict=True))
        return whole[0] - forward, whole[1] - backward

    def waiting(self) -> Pair | None:
        """Microseconds that an idle GPU waits for the host; None on a CPU."""
        called, whole = self.whole("elapsed"), self.whole("device")
        return called and whole and (called[0] - whole[0], called[1] - whole[1])


Found = dict[str, KindOfLayer]
OnProgress = Callable[[float, int, str], None]


def measure(
    kinds: Sequence[str],
    tokens: int,
    device: str,
    repeats: int,
    seed: int,
    compiled: bool,
    on_progress: OnProgress,
) -> tuple[Found, dict[str, Any]]:
    """Judge and time the layers, one kind after the other; return them and their sizes."""
    inputs, layers, sizes = build(tokens, device, seed)
    found: Found = {}
    for place, kind in enumerate(kinds):
        pair = layers[kind]
        on_progress(3 * place, 3 * len(kinds), f"{kind}: judges")
        errors = judge(pair, inputs)
        on_progress(3 * place + 1, 3 * len(kinds), f"{kind}: times the whole")
        contenders, missing = dict(pair), {}
        if compiled:
            missing = _add_compiled(contenders, inputs)
        wholes = _time_wholes(contenders, inputs, device, repeats, seed)
        on_progress(3 * place + 2, 3 * len(kinds), f"{kind}: times the parts")
        parts = time_parts(record(pair[OURS], inputs), device, repeats, seed)
        found[kind] = KindOfLayer(wholes, parts, errors, missing)
    return found, sizes


def _add_compiled(contenders: dict[str, Layer], inputs: Inputs) -> dict[str, str]:
    """Add both layers compiled; return why one is not, by its name."""
    missing = {}
    for name, title in COMPILED.items():
        layer = contenders[name]
        compiled = layer._replace(attention=torch.compile(layer.attention))
        try:
            compiled.train(*inputs)
        except Exception as error:  # the compiler's own, of any kind
            missing[title] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        else:
            contenders[title] = compiled
    return missing


def _time_wholes(
    contenders: dict[str, Layer], inputs: Inputs, device: str, repeats: int, seed: int
) -> dict[str, dict[str, Measured]]:
    """Times by contender and direction."""
    calls: dict[tuple[str, str], Call] = {}
    for name, layer in contenders.items():
        calls[name, FORWARD] = partial(layer.run, inputs.hidden)
        calls[name, BOTH] = partial(layer.train, *inputs)
    found = in_turns(calls, device, repeats, seed)
    return {name: {what: found[name, what] for what in (FORWARD, BOTH)} for name in contenders}


def document(found: Found, sizes: dict[str, Any], device: str, protocol: dict[str, int]) -> Any:
    """The JSON-ready result; times in microseconds."""
    checkout = find_checkout()
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": checkout.as_dict() if checkout else None,
        "machine": describe_machine().as_dict(),
        "clocks": clocks() if device == "cuda" else {},
        "versions": versions("transformers", "triton"),
        "protocol": {"times": PROTOCOL, "device": device, **protocol},
        "sizes": sizes,
        "layers": {
            kind: asdict(one)
            | {"remainder": one.remainder(), "waiting": one.waiting(), "findings": one.findings}
            for kind, one in found.items()
        },
    }
