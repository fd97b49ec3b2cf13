"""Every FLASHDSA_* environment variable, read into one frozen dataclass."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache, lru_cache
from typing import Any

from flashdsa.errors import ArgumentValueError

BACKENDS = (
    "auto",
    "cpu",
    "torch",
    "triton",
    "sm90",
    "sm100",
    "emulate-sm90",
    "emulate-sm100",
    "emulate-triton",
)

VLLM_V4 = "FLASHDSA_VLLM_V4"
"""The variable that makes vLLM's layers of DeepSeek-V4 and V4.1 call flashdsa."""
LARGEST_CLUSTER = 16
"""CTAs of a cluster, at most, on every GPU that has clusters."""

logger = logging.getLogger("flashdsa.settings")

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class Settings:
    """Settings that the environment asks for. `from_environment` reads them."""

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

    # Smaller ones wait less for SMs that other streams hold. Read when a size is first launched.
    max_cluster: int | None = field(
        default=None,
        metadata={
            "variable": "FLASHDSA_MAX_CLUSTER",
            "help": "most CTAs of a cluster, 1 to 16; not set: 13 in the indexer, 16 in the decode",
        },
    )

    @classmethod
    def from_environment(cls) -> Settings:
        """The settings of this process's environment, read again at each call.

        Raises:
            ArgumentValueError: a variable holds a value that it does not take.
        """
        return _of_raw(*map(_environment.get, _VARIABLES))

    def rows(self) -> list[tuple[str, str, str]]:
        """(variable, value in force, help) of every setting, for `flashdsa info`."""
        return [
            (f.metadata["variable"], _as_written(getattr(self, f.name)), f.metadata["help"])
            for f in fields(self)
        ]


_environment: Any = getattr(os.environ, "_data", os.environ)
_VARIABLES = tuple(
    name if _environment is os.environ else os.environ.encodekey(name)
    for name in ("FLASHDSA_BACKEND", "FLASHDSA_CHECK", "FLASHDSA_MAX_CLUSTER")
)
raw_setting: Callable[[Any], Any] = _environment.get
"""A variable as it is now, None where not set, by one of `RAW_NAMES`.

NOTE: `os.environ` decodes what it holds, which takes 0.5 us a look; this takes 0.04."""
RAW_NAMES = _VARIABLES[:2]


def raw_settings() -> tuple[Any, Any]:
    """FLASHDSA_BACKEND and FLASHDSA_CHECK as they are now, None where not set: what follows from
    them may be kept as long as they are equal."""
    backend, check = RAW_NAMES
    return raw_setting(backend), raw_setting(check)


@lru_cache
def _of_raw(*values: Any) -> Settings:
    """Return the settings of the raw values of `_VARIABLES`; None: a variable is not set."""
    _warn_of_unknown()
    return _parse(*("" if value is None else os.fsdecode(value) for value in values))


@cache
def _warn_of_unknown() -> None:
    """Say once which variables of our name do nothing: FLASHDSA_CHEK=1 checks nothing."""
    known = [*(row[0] for row in Settings().rows()), VLLM_V4]
    for name in sorted(os.environ):
        if name.startswith("FLASHDSA_") and name not in known:
            logger.warning("%s: not read; expected one of %s", name, ", ".join(known))


def _parse(backend: str, check: str, max_cluster: str) -> Settings:
    backend = backend or "auto"
    if backend not in BACKENDS:
        raise ArgumentValueError(
            f"FLASHDSA_BACKEND: expected one of {', '.join(BACKENDS)}; got {backend!r}"
        )
    check = check.lower()
    if check not in _TRUE + _FALSE:
        raise ArgumentValueError(f"FLASHDSA_CHECK: expected 0 or 1; got {check!r}")
    sizes = [str(size) for size in range(1, LARGEST_CLUSTER + 1)]
    if max_cluster and max_cluster not in sizes:
        raise ArgumentValueError(
            f"FLASHDSA_MAX_CLUSTER: expected 1 to {LARGEST_CLUSTER}; got {max_cluster!r}"
        )
    return Settings(backend, check in _TRUE, int(max_cluster) if max_cluster else None)


def _as_written(value: object) -> str:
    """A value as its variable takes it; nothing where that is not set."""
    if value is None:
        return ""
    return str(int(value)) if isinstance(value, bool) else str(value)
