"""What a call must raise."""

from __future__ import annotations

from collections.abc import Callable

Call = Callable[[], object]


def require_error(call: Call, kind: type[Exception], *parts: str) -> Exception:
    """The error: `call` raises `kind` with all `parts` in its message."""
    try:
        call()
    except kind as error:
        missing = [part for part in parts if part not in str(error)]
        assert not missing, f"{missing} not in {error}"
        return error
    raise AssertionError(f"expected {kind.__name__}: {parts}")
