"""Calls like one that was served, known by torch's guards and served without checks.

A guard, by which `torch.compile` knows its inputs again, compares types, dispatch keys (with those
that a thread includes and excludes: autocast, transforms, modes), dtypes, devices, sizes, strides
and whether operands have gradients. After a pause of the process everything that a call does in
Python takes ten times as long, and the checks are most of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from flashdsa.dispatch.heap import heap
from flashdsa.dispatch.overlap import num_bytes, share_memory
from flashdsa.settings import RAW_NAMES, raw_setting, raw_settings

if TYPE_CHECKING:
    from flashdsa.dispatch.rows import Parameter
    from flashdsa.dispatch.spec import OpSpec

Serve = Callable[[Sequence[Any]], Any]
"""Function of an operation's operands: serves calls like the one that it was bound for."""
Matches = Callable[..., bool]
"""Whether operands are like those of a call that was served."""
OUTSIDE, INSIDE, BACKWARD = range(3)
"""Ways into the cache: a public call; below torch's dispatcher, which has dealt with gradients and
modes; whether a backward is served."""
MOST_CALLS, MOST_ALIKE = 4096, 16
"""Calls, and calls with one key, that a cache holds: the next one empties it."""
_Guards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)


class CallCache:
    """The bound functions of an operation, by parameters, settings and the operands' guards."""

    def __init__(self, spec: OpSpec) -> None:
        """Remember nothing yet."""
        self._spec = spec
        self._calls: dict[tuple[Any, ...], list[tuple[Matches, Serve]]] = {}
        self._count = 0
        rows = enumerate(spec.operands)
        self._keyed = max(n for n, x in rows if not (x.optional or x.written or x.free))
        self.find = self._finder(spec.parameters)

    def _finder(self, parameters: Sequence[Parameter]) -> Callable[..., Serve | None]:
        get, keyed = self._calls.get, self._keyed
        setting, (backend_name, check_name) = raw_setting, RAW_NAMES
        has_modes = torch._C._len_torch_function_stack
        has_dispatch_modes = torch._C._len_torch_dispatch_stack
        # 1, 1.0 and True are equal keys.
        kinds = {"int": int, "bool": bool}
        typed = [
            (n, kinds[x.kind]) for n, x in enumerate(parameters) if x.kind in kinds and x.given
        ]

        def find(operands: Any, values: Any, backend: Any, way: int = OUTSIDE) -> Serve | None:
            """Return the function that serves such a call, if one was kept; arguments of any kind.

            Args:
                operands: None where an optional one is missing. values: the parameters'.
            """
            # Guards do not see torch function modes, fake tensor modes, profilers and forward-mode
            # AD.
            if way == OUTSIDE and (
                has_modes()
                or has_dispatch_modes()
                or profiler._is_profiler_enabled
                or forward_ad._current_level >= 0
            ):
                return None
            try:
                elements = operands[keyed].numel()
                settings = setting(backend_name), setting(check_name)
                alike = get((elements, values, backend, way, settings))
                if alike is not None:
                    for number, kind in typed:
                        if type(values[number]) is not kind:
                            return None
                    for matches, serve in alike:
                        if matches(*operands):
                            return serve
            # One is no tensor, or has no strides or address; a value has no hash.
            except (TypeError, AttributeError, RuntimeError):
                pass
            return None

        return find

    def keep(
        self,
        operands: Sequence[Tensor | None],
        values: Sequence[Any],
        backend: str,
        serve: Serve,
        way: int = OUTSIDE,
    ) -> None:
        """`serve` serves calls with operands like these and such values."""
        if _Guards is None:
            return
        recorded = torch.is_grad_enabled() if way == OUTSIDE else None
        matches = self._matcher(operands, recorded)
        keyed = operands[self._keyed]
        assert keyed is not None
        key = (keyed.numel(), values, backend, way, raw_settings())
        if len(self._calls.get(key, ())) >= MOST_ALIKE:
            self._count -= len(self._calls.pop(key))
        if self._count >= MOST_CALLS:
            self.clear()
        self._calls.setdefault(key, []).insert(0, (matches, serve))
        self._count += 1
        if keyed.device.type == "cpu":
            heap.note(sum(num_bytes(x) for x in operands if x is not None))

    def clear(self) -> None:
        """Every call is new again."""
        self._calls.clear()
        self._count = 0

    def _matcher(self, operands: Sequence[Tensor | None], recorded: bool | None) -> Matches:
        """Return a function of operands that compares them with these.

        recorded: whether gradients are recorded, where it matters; guards do not see it.

        Besides what guards see it looks at where operands begin, how far free sizes go, and whether
        what is written lies apart. It runs in every call: an expression without loops.
        """
        rows = self._spec.operands
        numbers: dict[int, int] = {}
        given: dict[int, Tensor] = {}  # guards take no tensor twice
        for n, x in enumerate(operands):
            if x is not None and numbers.setdefault(id(x), n) == n:
                given[n] = x
        free = {n: rows[n].free_dims for n in given}
        if not all(0 < given[n].shape[d] <= most for n in free for d, most in free[n].items()):
            free = {n: {} for n in given}
        fixed = {n: _Fixed(n, x, free[n]) for n, x in given.items()}
        tests = [
            f"x{n} is {'None' if x is None else f'x{numbers[id(x)]}'}"
            for n, x in enumerate(operands)
            if n not in given
        ]
        tests += [f"x{n} is not None" for n in given if rows[n].optional]
        tests += [f"not x{n}.is_nested" for n in given]
        tests.append(f"alike({', '.join(f'x{n}' for n in given)})")
        tests += [
            f"not x{n}.storage_offset() % {rows[n].begins_at}"
            for n in given
            if rows[n].begins_at > 1
        ]
        if recorded is not None and any(x.requires_grad for x in given.values()):
            tests.append("grads()" if recorded else "not grads()")
        tests += [test for x in fixed.values() for test in x.tests]
        tests += _apart(fixed, self._spec.written)
        guards = _Guards(
            *given.values(),
            dynamic_dims_sizes=[x.sizes for x in fixed.values()],
            dynamic_dims_strides=[x.strides for x in fixed.values()],
        )
        arguments = ", ".join(f"x{n}" for n in range(len(rows)))
        names = {"alike": guards.check, "share": share_memory, "grads": torch.is_grad_enabled}
        matches: Matches = eval(f"lambda {arguments}: {' and '.join(tests)}", names)
        return matches


class _Fixed:
    """The sizes and strides of operand `number` that calls alike have too; None for the others.

    An operand with a free size has no gaps, or the strides of this one.
    """

    def __init__(self, number: int, tensor: Tensor, free: Mapping[int, int]) -> None:
        """`free`: the dimension of the free size, if there is one, and the most that it takes."""
        name, elements = f"x{number}", tensor.numel()
        self.is_empty, dense = not elements, tensor.is_contiguous()
        self.sizes = [None if d in free else size for d, size in enumerate(tensor.shape)]
        self.strides: list[int | None] = list(tensor.stride())
        self.tests: list[str] = []
        """Expressions that are true if the free size is one that bound functions take."""
        self.num_bytes = str(num_bytes(tensor))
        """Bytes that an operand reaches at most from its first element on, an expression."""
        for dim, most in free.items():
            others, step = elements // tensor.shape[dim], tensor.itemsize * tensor.stride(dim)
            if dense and dim:
                self.strides[:dim] = [None] * dim
                self.tests.append(f"{name}.is_contiguous()")
            self.tests.append(f"0 < (n{number} := {name}.numel()) <= {most * others}")
            reach = num_bytes(tensor.select(dim, 0))
            self.num_bytes = f"({reach} + n{number} * {step} // {others})"
            if dense:
                self.num_bytes = f"n{number} * {tensor.itemsize}"


def _apart(fixed: Mapping[int, _Fixed], written: Sequence[int]) -> list[str]:
    """Expressions that are true where no written operand shares memory with another one."""
    filled = [n for n, x in fixed.items() if not x.is_empty]
    tests = []
    for one in filled:
        begin = f"(at{one} := x{one}.data_ptr())"
        for other in filled if one in written else ():
            if other > one or other not in written:
                tests.append(
                    f"(not -{fixed[other].num_bytes} < x{other}.data_ptr() - {begin}"
                    f" < {fixed[one].num_bytes} or not share(x{one}, x{other}))"
                )
                begin = f"at{one}"
    return tests
