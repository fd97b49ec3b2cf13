"""Attributes and environment variables replaced for a while, and put back in reverse order."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

_ABSENT = object()


class Patches:
    """A pile of what was replaced; `undo` restores what stood there before."""

    def __init__(self) -> None:
        self._undo = ExitStack()

    def replace(self, owner: Any, name: str, value: Any) -> Any:
        """Set `owner.name`; returns what was there, or None.

        Only what the owner itself holds is put back: a class that inherited the attribute
        inherits it again.
        """
        own = vars(owner).get(name, _ABSENT)
        before = getattr(owner, name, None)
        setattr(owner, name, value)
        if own is _ABSENT:
            self._undo.callback(delattr, owner, name)
        else:
            self._undo.callback(setattr, owner, name, own)
        return before

    def set_variable(self, name: str, value: str) -> None:
        """Set a variable of the environment."""
        before = os.environ.get(name)
        if before is None:
            self._undo.callback(os.environ.pop, name, None)
        else:
            self._undo.callback(os.environ.__setitem__, name, before)
        os.environ[name] = value

    def undo(self) -> None:
        """Put everything back."""
        self._undo.close()
