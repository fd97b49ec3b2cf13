"""flashdsa: DeepSeek Sparse Attention. The public names; torch is imported at their first use."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashdsa.ops import *  # noqa: F403 - their names stand in the files

try:
    __version__ = version("flashdsa")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"


def _public() -> list[str]:
    names: list[str] = import_module("flashdsa.ops").PUBLIC
    return names


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return _public()
    # Python asks for a module's name before it imports the module, which must not import torch.
    if not name.startswith("_") and find_spec(f"flashdsa.{name}") is None and name in _public():
        function = globals()[name] = getattr(import_module("flashdsa.ops"), name)
        return function
    raise AttributeError(f"module 'flashdsa' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*_public(), *(name for name in globals() if name.startswith("__"))})
