"""Calls like one that was served, known by one look of torch's own guards.

A guard, by which `torch.compile` knows its inputs again, compares types, dispatch keys (with those
that a thread includes and excludes: autocast, transforms, modes), dtypes, devices, sizes, strides
and whether gradients are asked for. After a pause of the process everything that a call does in
Python takes ten times as long, and the checks are most of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from flashdsa.ops.overlap import apart_again

Serve = Callable[[Sequence[Any]], Any]
"""Function of an operation's operands: serves calls like the one that it was made for."""
_Guards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)


class _Alike(NamedTuple):
    """Calls that are served alike.

    Attributes:
        given: of the operands those that are not missing; None: all. missing: numbers of the rest.
        are_apart: whether those that are written share no memory with others, which guards do not
            see; None: none is written.
    """

    given: Callable[[Sequence[Any]], tuple[Any, ...]] | None
    missing: tuple[int, ...]
    matches: Callable[..., bool]
    serve: Serve
    are_apart: Callable[[Sequence[Any]], bool] | None


class CallMemory:
    """Functions by what chose them and by their operands' guards."""

    def __init__(
        self,
        begins_at: Mapping[int, int] | None = None,
        written: Sequence[int] = (),
        most_keys: int = 1024,
        most_alike: int = 16,
    ) -> None:
        """Holds so many keys at most, and calls with one key: the next one empties it.

        Args:
            begins_at: by the number of an operand, the number of elements at a multiple of which it
                must begin in its storage, which guards do not see; operands that are never missing.
            written: numbers of the operands that are written.
        """
        self._begins_at = tuple((begins_at or {}).items())
        self._written = tuple(written)
        self._most_keys, self._most_alike = most_keys, most_alike
        self._calls: dict[tuple[Any, ...], list[_Alike]] = {}

    def find(self, key: tuple[Any, ...], operands: Sequence[Any]) -> Serve | None:
        """Return the function that serves a call with this key and such operands, if one was kept.

        Args:
            operands: whatever they are; None where an optional one is missing.
        """
        try:
            calls = self._calls.get(key)
        except TypeError:  # something in it cannot be hashed: no call like this was served
            return None
        # Guards do not see torch function modes, profilers and forward-mode AD.
        if (
            calls is None
            or torch._C._len_torch_function_stack()
            or profiler._is_profiler_enabled
            or forward_ad._current_level >= 0
        ):
            return None
        try:  # a guard that looks at a nested tensor ends the process
            if [x for x in operands if x is not None and x.is_nested]:
                return None
        except AttributeError:  # one is no tensor
            return None
        for given, missing, matches, serve, are_apart in calls:
            if given is None:
                if not matches(*operands):
                    continue
            elif not (all(operands[i] is None for i in missing) and matches(*given(operands))):
                continue
            if any(operands[i].storage_offset() % multiple for i, multiple in self._begins_at):
                return None
            return serve if are_apart is None or are_apart(operands) else None
        return None

    def keep(self, key: tuple[Any, ...], operands: Sequence[Tensor | None], serve: Serve) -> None:
        """`serve` serves calls with this key and operands like these, if none of them asks for a
        gradient."""
        present = [i for i, x in enumerate(operands) if x is not None]
        missing = tuple(i for i, x in enumerate(operands) if x is None)
        given = itemgetter(*present) if missing and len(present) > 1 else None
        tensors = [x for x in operands if x is not None]
        if _Guards is None or any(x.requires_grad for x in tensors) or (missing and given is None):
            return
        if key not in self._calls and len(self._calls) >= self._most_keys:
            self._calls.clear()
        calls = self._calls.setdefault(key, [])
        if len(calls) >= self._most_alike:
            calls.clear()
        matches = _Guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        if matches(*tensors):  # not if one of them is there twice
            are_apart = apart_again(operands, self._written) if self._written else None
            calls.append(_Alike(given, missing, matches, serve, are_apart))

    def clear(self) -> None:
        """Every call is new again."""
        self._calls.clear()
