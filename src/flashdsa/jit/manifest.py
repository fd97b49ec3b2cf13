"""Manifest of the objects that `make kernels` made: which functions, from what, with what."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashdsa.jit.elf import exported_symbols
from flashdsa.jit.shared_object import sources_of
from flashdsa.jit.sources import package_hash, source_hash
from flashdsa.jit.user_cache import package_version
from flashdsa.kernels.catalog import BACKENDS, variants_of

NAME = "manifest.json"
EXPORT = "__tvm_ffi_"
"""Prefix of a function's name in its object."""
CUDART = "12.8"
"""The oldest CUDA runtime whose functions the objects call."""
TOOLS = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu12", "nvidia-cutlass-dsl-libs-cu13")


def write_manifest(folder: Path) -> Path:
    """Describe every object in `folder` as it is."""
    path = folder / NAME
    content = {
        "host": f"{platform.machine()}-linux",
        "built_with": _tools(),
        "requires": {"cudart": CUDART},
        "objects": {one.name: describe(one) for one in sorted(folder.glob("*.so"))},
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def read_manifest(folder: Path) -> Mapping[str, Any] | None:
    """The folder's manifest, as `write_manifest` wrote it; None if it has none."""
    try:
        content: Mapping[str, Any] = json.loads((folder / NAME).read_text())
    except OSError:
        return None
    return content


def described(path: Path) -> Mapping[str, Any]:
    """The manifest's entry for an object beside it; empty if it has none."""
    said: Mapping[str, Any] = (read_manifest(path.parent) or {}).get("objects", {})
    return dict(said.get(path.name, {}))


def describe(path: Path) -> dict[str, Any]:
    """An object's hash, size, sources, and the functions that can be called in it.

    "package" is the package's hash if the object is of its sources, and otherwise empty: while the
    package is the same, nobody needs to find out again what the object's sources are.
    """
    backend, sources = path.stem, sources_of(path)
    ours = backend in BACKENDS and sources == source_hash(list(variants_of(backend).values()))
    return {
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "bytes": path.stat().st_size,
        "sources": sources,
        "package": package_hash() if ours else "",
        "functions": function_names(path),
    }


def function_names(path: Path) -> list[str]:
    """The compiled functions in an object."""
    return [name.removeprefix(EXPORT) for name in exported_symbols(path) if name.startswith(EXPORT)]


def _tools() -> dict[str, str]:
    found = {name: one for name in TOOLS if (one := package_version(name)) is not None}
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is not None:
        said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
        found["cc"] = said.stdout.partition("\n")[0]
    return found
