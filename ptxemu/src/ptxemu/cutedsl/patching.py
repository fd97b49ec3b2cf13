"""Attributes replaced for a while, and put back in reverse order."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class Patches:
    """A pile of replaced attributes; `undo` restores what stood there before."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> Any:
        """Set `owner.name`; returns what was there, or None.

        Only what the owner itself holds is put back: a class that inherited the attribute
        inherits it again.
        """
        own = vars(owner).get(name, _ABSENT)
        before = getattr(owner, name, None)
        setattr(owner, name, value)
        self._undo.append((owner, name, own))
        return before

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            owner, name, own = self._undo.pop()
            if own is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
