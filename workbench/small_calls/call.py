"""A call of a public operation: small enough for an emulator or a sanitizer, planted, judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol
from unittest.mock import patch

import torch
from torch import Tensor

from flashdsa.backends.emulated.devices import B200, H200, Device
from flashdsa.backends.emulated.runner import Emulator, running_on
from flashdsa.backends.runner import Runner
from flashdsa.kernels.catalog import KERNELS
from flashdsa.plan.kernel_spec import KernelSpec
from flashdsa.verify import calls, judge_indexer, judge_sparse_mla
from flashdsa.verify import judge_indexer_training as judge_training
from flashdsa.verify.check_list import Check, checks_of
from flashdsa.verify.compare import Comparison
from flashdsa.verify.indexer_cases import make_indexer_inputs
from flashdsa.verify.indexer_training_cases import make_indexer_training_inputs
from flashdsa.verify.prefill_cases import make_prefill_inputs
from flashdsa.verify.sparse_mla_cases import make_sparse_mla_inputs

SEED = 0
HOPPER, BLACKWELL = "sm90", "sm100"
_DEVICES = {HOPPER: H200, BLACKWELL: B200}
Plant = Callable[[Any], None]


class Small(Protocol):
    """A small call.

    Attributes:
        name: for people; the calls of a kernel have different ones.
        backend: "sm90" or "sm100".
        sms: streaming multiprocessors of the device, few so that CTAs have several work items; 0:
            as many as the GPU has.
        emulated_only: it takes a plan that is not compiled ahead.
    """

    @property
    def name(self) -> str: ...
    @property
    def backend(self) -> str: ...
    @property
    def sms(self) -> int: ...
    @property
    def emulated_only(self) -> bool: ...

    def launch(self, runner: Runner) -> object:
        """The call alone: nothing is judged."""

    def judge(self, runner: Runner) -> list[Comparison]:
        """The call, and the verdicts on its results."""


@dataclass(frozen=True)
class SmallCall:
    """A public operation on a case of `flashdsa.verify`; see `Small`.

    Attributes:
        operation: as `flashdsa check` names it.
        case: of the operation's inputs; a text: the case of `flashdsa check` of that name.
        options: of the operation. plant: changes the inputs before the call.
        settings: "module:name" -> what stands in its place during the call. Emulated only.
    """

    operation: str
    case: Any
    sms: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    plant: Plant | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    backend: str = HOPPER

    @property
    def name(self) -> str:
        return str(getattr(self.case, "name", self.case))

    @property
    def emulated_only(self) -> bool:
        """Compiled kernels have the settings of the sources."""
        return bool(self.settings)

    def launch(self, runner: Runner) -> object:
        """The call alone, of any O and lse where it takes them."""
        with self._on(runner) as backend:
            if isinstance(self.case, str):
                return self._check(backend).call()
            inputs, _ = self._inputs()
            if self.operation == "mla_bwd":
                given = judge_sparse_mla.forward_results(inputs)
                return calls.mla_bwd(inputs, *given, backend, **self.options)
            if self.operation == "attention_target":
                _, lse = judge_sparse_mla.forward_results(inputs.attention)
                return calls.attention_target(inputs, lse, backend)
            return getattr(calls, self.operation)(inputs, backend, **self.options)

    def judge(self, runner: Runner) -> list[Comparison]:
        """The call on the device, its judge on the CPU: sanitizers make each launch slow."""
        with self._on(runner) as backend:
            if isinstance(self.case, str):
                return self._check(backend).judge()
            inputs, check = self._inputs()
            verdicts: list[Comparison] = check(inputs, backend, **self.options)
            return verdicts

    def _inputs(self) -> tuple[Any, Callable[..., list[Comparison]]]:
        make, check = _OPERATIONS[self.operation]
        inputs = make(self.case, SEED, "cpu")
        if self.plant is not None:
            self.plant(inputs)
        return inputs, check

    def _check(self, backend: str) -> Check:
        device = "cpu" if backend.startswith("emulate") else "cuda"
        checks = checks_of(SEED, backend, device)
        return next(c for c in checks if (c.operation, c.case) == (self.operation, self.case))

    @contextmanager
    def _on(self, runner: Runner) -> Iterator[str]:
        """Operations run there; gives the name of the backend."""
        with ExitStack() as stack:
            for name, value in self.settings.items():
                stack.enter_context(patch(name.replace(":", "."), value))
            if getattr(runner, "device", None) is None:
                stack.enter_context(running_on(runner))
                yield f"emulate-{self.backend}"
                return
            for name in set(_OPERATIONS) & set(vars(calls)):
                call = partial(_call_on_gpu, getattr(calls, name))
                stack.enter_context(patch.object(calls, name, call))
            yield self.backend


def _judge_selection(inputs: Any, backend: str) -> list[Comparison]:
    scores = calls.indexer_logits(inputs, backend)
    return judge_indexer.check_selection(inputs, scores, backend)


def _judge_prefill(inputs: Any, backend: str) -> list[Comparison]:
    scores = calls.prefill_logits(inputs, backend)
    return judge_indexer.check_prefill_selection(inputs, scores, backend)


_OPERATIONS: dict[str, tuple[Callable[..., Any], Callable[..., list[Comparison]]]] = {
    "sparse_mla_fwd": (make_sparse_mla_inputs, judge_sparse_mla.check_forward),
    "mla_bwd": (make_sparse_mla_inputs, judge_sparse_mla.check_backward),
    "dsa_topk_indexer": (make_indexer_inputs, _judge_selection),
    "indexer_logits": (make_indexer_inputs, lambda x, b: judge_indexer.check_scores(x, b)[1]),
    "dsa_topk_prefill": (make_prefill_inputs, _judge_prefill),
    "prefill_logits": (
        make_prefill_inputs,
        lambda x, b: judge_indexer.check_prefill_scores(x, b)[1],
    ),
    "attention_target": (make_indexer_training_inputs, judge_training.check_target),
    "indexer_scores": (make_indexer_training_inputs, judge_training.check_index_scores),
    "indexer_bwd": (make_indexer_training_inputs, judge_training.check_index_backward),
}
"""Functions that make an operation's inputs and judge its results."""


def _call_on_gpu(call: Callable[..., Any], *given: Any, **options: Any) -> Any:
    return _moved(call(*_moved(given, "cuda"), **options), "cpu")


def _moved(x: Any, device: str) -> Any:
    """`x` with its tensors on a device."""
    if isinstance(x, Tensor):
        return x.to(device)
    if isinstance(x, tuple):
        return tuple(_moved(part, device) for part in x)
    if is_dataclass(x) and not isinstance(x, type):
        parts = {part.name: getattr(x, part.name) for part in fields(x) if part.init}
        return replace(x, **{name: _moved(part, device) for name, part in parts.items()})
    return x


def device_of(call: Small) -> Device:
    """The call's, of so many multiprocessors, which clusters divide."""
    if not call.sms:
        return _DEVICES[call.backend]
    clusters = {size: call.sms // size for size in range(1, call.sms + 1)}
    return Device(call.sms, MappingProxyType(clusters))


def emulator_of(call: Small, **options: Any) -> Emulator:
    """An emulator of the call's device, which collects what it finds.

    Args:
        options: of `Emulator`.
    """
    return Emulator(device_of(call), **{"on_finding": "collect", **options})


def gpu_of(call: Small) -> Runner:
    """The GPU of this process, as if it had the call's device's multiprocessors. A process has it
    for one call: what runs an operation is kept."""
    from flashdsa.backends.gpu.runner import gpu

    runner = gpu(torch.device("cuda", torch.cuda.current_device()))
    if call.sms:
        clusters = device_of(call).clusters
        runner.num_sms = call.sms
        patch.object(runner, "cluster_capacity", lambda threads, smem_bytes: clusters).start()
    return runner


@contextmanager
def replace_function(
    runner: Runner, choose: Callable[[KernelSpec, Any], Callable[..., Any] | None]
) -> Iterator[None]:
    """The runner launches what `choose` gives for a kernel and a plan; None: the right one."""
    right = runner.function

    def function(spec: KernelSpec, plan: Any) -> Callable[..., Any]:
        return choose(spec, plan) or right(spec, plan)

    with patch.object(runner, "function", function):
        yield


IGNORED = ("unordered-float-additions",)
"""Codes of findings that come and go with the schedule in the original, too."""


@dataclass(frozen=True)
class Row:
    """A kernel, or a form of it that has instructions of its own, and its small calls.

    Attributes:
        kernel: its name in the catalog.
        helper: the entry in the place of the kernel's own: what is launched before it, say.
        mutated: how many calls, from the first on, are repeated with each mutant; 0: it has no
            synchronisation, or another row is of the same instructions.
        scratch: arrays in which the kernel leaves what depends on the schedule, as ptxemu names
            them.
        lanes_apart: a warp's lanes go apart, and bar.warp.sync is broken, too.
    """

    kernel: str
    calls: tuple[Small, ...]
    helper: str = ""
    mutated: int | None = None
    scratch: tuple[str, ...] = ()
    lanes_apart: bool = False

    @property
    def spec(self) -> KernelSpec:
        """The kernel's entry in the catalog."""
        names = self.kernel, self.calls[0].backend
        return next(spec for spec in KERNELS if (spec.name, spec.backend) == names)

    @property
    def entry(self) -> str:
        """Part of the PTX function's name."""
        return self.helper or self.spec.entry

    @property
    def repeated(self) -> tuple[Small, ...]:
        """The calls that are repeated with each mutant."""
        return self.calls[: self.mutated]


if TYPE_CHECKING:
    from ptxemu.launch_setup import LaunchSetup


class _RecordedError(Exception):
    """Ends a call whose kernel has been recorded."""


def record(call: Small, entry: str, path: Path) -> None:
    """Write the call's first launch of a kernel (whose name begins with `entry`) to a file.

    Raises:
        LookupError: it launches none of that name.
    """
    from ptxemu.cli.kernel_names import file_name
    from ptxemu.saved_launch import save_launch

    def on_launch(setup: LaunchSetup) -> None:
        if file_name(setup.kernel).startswith(entry):
            path.parent.mkdir(parents=True, exist_ok=True)
            save_launch(setup, path)
            raise _RecordedError

    try:
        call.launch(emulator_of(call, on_launch=on_launch))
    except _RecordedError:
        return
    raise LookupError(f"{call.name}: launches no {entry}")


def path_of_launch(folder: Path, name: str, number: int) -> Path:
    """The file of a row's call."""
    return folder / f"{name}.{number}.launch"
