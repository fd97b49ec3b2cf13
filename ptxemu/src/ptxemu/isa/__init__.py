"""The instructions: one file per section of the PTX manual, one small function an instruction."""

from __future__ import annotations

import pkgutil
from importlib import import_module


def load_all() -> None:
    """Import every file of this package, so that its definitions are in the registry."""
    for module in pkgutil.iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
