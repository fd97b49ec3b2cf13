"""Refusal, by name, of arguments that flashdsa has no use for."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashdsa.errors import UnsupportedError


def require_default(
    function: str, name: str, value: object, *, instead: str, default: object = None
) -> None:
    """Raise UnsupportedError where `value` is not the one that the adapter can honour.

    Args:
        function, name: of the peer's function and its parameter.
        instead: what the caller can do.
        default: the value that is honoured.
    """
    if value is default or (not isinstance(value, Tensor) and value == default):
        return
    raise UnsupportedError(
        f"{function}: {name}={_shown(value)} is not served here, only {name}={default!r}; {instead}"
    )


def _shown(value: object) -> Any:
    if isinstance(value, Tensor):
        return f"<{str(value.dtype).removeprefix('torch.')} tensor {list(value.shape)}>"
    return repr(value)


def copy_into(out: Tensor | None, result: Tensor) -> Tensor:
    """The caller's buffer with the result in it, or the result where there is no buffer."""
    return result if out is None else out.copy_(result.view(out.shape))
