"""Every FLASHDSA_* environment variable, read into one frozen dataclass."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from functools import lru_cache

from flashdsa.errors import ArgumentValueError

BACKENDS = ("auto", "cpu", "sm90", "sm100", "emulate-sm90", "emulate-sm100")

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class Settings:
    """What the environment asks for. `from_environment` reads it."""

    backend: str = field(
        default="auto",
        metadata={
            "variable": "FLASHDSA_BACKEND",
            "help": f"backend used where a call says backend='auto': one of {', '.join(BACKENDS)}",
        },
    )
    check: bool = field(
        default=False,
        metadata={
            "variable": "FLASHDSA_CHECK",
            "help": "1: check the values of device tensors too (lengths, page ids); slower",
        },
    )

    @classmethod
    def from_environment(cls) -> Settings:
        """The settings of this process's environment, read again at each call.

        Raises:
            ArgumentValueError: a variable holds a value that it does not take.
        """
        return _parse(environment_backend(), os.environ.get("FLASHDSA_CHECK", ""))

    def rows(self) -> list[tuple[str, str, str]]:
        """(variable, value in force, help) of every setting, for `flashdsa info`."""
        return [
            (f.metadata["variable"], _as_written(getattr(self, f.name)), f.metadata["help"])
            for f in fields(self)
        ]


def environment_backend() -> str:
    """FLASHDSA_BACKEND as it is, for those who keep what follows from it."""
    return os.environ.get("FLASHDSA_BACKEND", "")


def checks_values() -> bool:
    """`Settings.from_environment().check`, fast where the variable is not set."""
    return os.environ.get("FLASHDSA_CHECK") is not None and Settings.from_environment().check


@lru_cache
def _parse(backend: str, check: str) -> Settings:
    backend = backend or "auto"
    if backend not in BACKENDS:
        raise ArgumentValueError(
            f"FLASHDSA_BACKEND: expected one of {', '.join(BACKENDS)}; got {backend!r}"
        )
    check = check.lower()
    if check not in _TRUE + _FALSE:
        raise ArgumentValueError(f"FLASHDSA_CHECK: expected 0 or 1; got {check!r}")
    return Settings(backend=backend, check=check in _TRUE)


def _as_written(value: object) -> str:
    """A value as its variable takes it."""
    return str(int(value)) if isinstance(value, bool) else str(value)
