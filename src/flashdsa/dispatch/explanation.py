"""Which backend and which kernels serve a call, and why: found by the code that serves it.

Operands without values go through the operation's checks, the registry and the backend's `bind`,
on a runner that only writes down what it is asked for. So nothing here knows a rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from textwrap import fill
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from flashdsa.backends.catalog import registry
from flashdsa.backends.emulated.devices import A100, B200, H200
from flashdsa.backends.indexer.tensors import without_values
from flashdsa.backends.reasons import Candidate, Choice
from flashdsa.backends.recorder import Launch, Recorder
from flashdsa.backends.registry import Implementation, resolve_backend
from flashdsa.backends.runner import DeviceFacts
from flashdsa.dispatch.rows import Parameters
from flashdsa.dispatch.spec import OpSpec
from flashdsa.errors import ArgumentTypeError, ArgumentValueError

GPUS: Mapping[str, DeviceFacts] = MappingProxyType({"h200": H200, "b200": B200, "a100": A100})
"""GPUs whose facts are known without one, by the names that `explain` takes."""
_GPU_OF_BACKEND = {"sm90": "h200", "sm100": "b200", "triton": "a100"}
_EMULATED = "emulate-"
_WIDTH = 80


@dataclass(frozen=True)
class Explanation:
    """Which backend and which kernels serve a call, and why; `str` of it is a table.

    Attributes:
        operation: its name. backend: that serves it.
        gpu: the GPU whose facts decided; "" where none did.
        sizes: of the operands, by their names in the operation's table.
        refusals: why each other backend does not serve the call.
        also: other backends that would serve it.
        launches: of kernels, in the order of the first ones, and how often each is made; none where
            torch's own functions do the work.
        choices: what was chosen among, or by which rules.
        function: "module:function" of the implementation.
    """

    operation: str
    backend: str
    gpu: str
    sizes: Mapping[str, int]
    refusals: Mapping[str, str]
    also: tuple[str, ...]
    function: str
    launches: Mapping[Launch, int] = field(default_factory=dict)
    choices: tuple[Choice, ...] = ()

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the launched kernels, each once, as the workbench's `inspect` takes them."""
        return tuple(dict.fromkeys(launch.kernel for launch in self.launches))

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why, of what is taken."""
        return tuple(x.reason for choice in self.choices for x in choice.candidates if x.taken)

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON takes it."""
        return {
            "operation": self.operation,
            "backend": self.backend,
            "gpu": self.gpu,
            "sizes": dict(self.sizes),
            "also": list(self.also),
            "refusals": dict(self.refusals),
            "function": self.function,
            "launches": [{**one._asdict(), "times": n} for one, n in self.launches.items()],
            "choices": [
                {"title": choice.title, "candidates": [x._asdict() for x in choice.candidates]}
                for choice in self.choices
            ],
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        also = f"; {' and '.join(self.also)} would serve it, too" if self.also else ""
        where = f" on {self.gpu}" if self.gpu else ""
        yield _folded(f"{self.operation}{where}: {self.backend}{also}")
        yield _folded(", ".join(f"{name} {size}" for name, size in self.sizes.items()), 2)
        for reason in dict.fromkeys(self.refusals.values()):
            who = [one for one, why in self.refusals.items() if why == reason]
            if who != ["cpu"]:  # of tensors on a GPU
                yield _folded(f"not {', '.join(who)}: {reason}", 2)
        yield ""
        if not self.launches:
            yield _folded(f"no kernels of our own: torch's, by {self.function}")
        else:
            yield "kernels"
        for launch, times in self.launches.items():
            yield _folded(f"{launch}{f', {times} times' if times > 1 else ''}", 2)
        for title, candidates in self.choices:
            if not candidates:
                continue
            yield ""
            yield _folded(title)
            for candidate in candidates:
                yield from _lines_of(candidate)


def _lines_of(one: Candidate) -> Iterator[str]:
    us = "" if one.us is None else f", {one.us:.1f} us predicted"
    yield _folded(f"{'> ' if one.taken else '  '}{one.kernels}", hang=4)
    yield _folded(f"{one.kind}{us}", 4)
    yield _folded(one.reason, 4)


def _folded(text: str, indent: int = 0, hang: int | None = None) -> str:
    """Text in lines of at most 80 columns. `hang`: of the lines after the first."""
    first, next_ones = " " * indent, " " * (indent + 2 if hang is None else hang)
    return fill(
        text, _WIDTH, initial_indent=first, subsequent_indent=next_ones, break_on_hyphens=False
    )


def explain_call(
    spec: OpSpec, operands: Any, parameters: Parameters, backend: str, gpu: str | None = None
) -> Explanation:
    """Explain a call of an operation, whose operands are in the table's form.

    Args:
        gpu: one of `GPUS`; None: the tensors' own, or of a backend that is named a usual one.

    Raises:
        ArgumentTypeError, ArgumentValueError: as the call would.
        UnsupportedError: no implementation serves it.
    """
    sizes = spec.check(operands, parameters)
    problem, first = spec.problem(operands, parameters, sizes), operands[0]
    backend = resolve_backend(backend)
    name, facts = _gpu_for(first, backend, gpu)
    is_there = gpu is None and first.device.type == "cuda"
    if facts is not None and not is_there and not backend.startswith(_EMULATED):
        problem = replace(problem, device="cuda", capability=facts.capability)
    found = registry.find(problem, backend)
    others = {
        backend: reason
        for backend, reason in registry.refusals(problem).items()
        if backend != found.backend and not backend.startswith(_EMULATED)
    }
    recorder = None
    if found.runner and facts is not None:
        recorder = _recorded(found, facts, operands, spec.passed(operands, parameters))
    return Explanation(
        operation=spec.operation,
        backend=found.backend,
        gpu=name,
        sizes=sizes,
        refusals={backend: reason for backend, reason in others.items() if reason},
        also=tuple(backend for backend, reason in reversed(others.items()) if not reason),
        function=found.bind,
        launches={} if recorder is None else dict(recorder.launches),
        choices=() if recorder is None else tuple(recorder.choices),
    )


def _recorded(
    found: Implementation, facts: DeviceFacts, operands: Any, parameters: Parameters
) -> Recorder:
    """Bind and make the call on tensors without values."""
    recorder = Recorder(facts, "meta")
    given = type(operands)(*map(_without_values, operands))
    with without_values(), torch.no_grad():
        found.binder()(recorder, given, **parameters)(given)
    return recorder


def _without_values(operand: Tensor | None) -> Tensor | None:
    """A tensor of the same sizes, strides and dtype on the device meta."""
    if operand is None:
        return None
    return torch.empty_strided(operand.shape, operand.stride(), dtype=operand.dtype, device="meta")


def _gpu_for(first: Tensor, backend: str, gpu: str | None) -> tuple[str, DeviceFacts | None]:
    """The name and the facts of the GPU that a call is explained for; None: there is none.

    Args:
        first: the first operand.
    """
    if gpu is not None and not isinstance(gpu, str):
        raise ArgumentTypeError(f"gpu: expected a str or None; got {type(gpu).__name__}")
    if gpu is None and first.device.type == "cuda":
        from flashdsa.backends.gpu.runner import gpu as gpu_of

        return torch.cuda.get_device_name(first.device), gpu_of(first.device)
    if gpu is None:
        gpu = _GPU_OF_BACKEND.get(backend.removeprefix(_EMULATED))
        if gpu is None:
            return "", None
    if gpu.lower() not in GPUS:
        raise ArgumentValueError(f"gpu: expected one of {', '.join(GPUS)}; got {gpu!r}")
    return gpu.upper(), GPUS[gpu.lower()]
