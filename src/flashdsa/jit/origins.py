"""Origin of each compiled kernel of this machine."""

from __future__ import annotations

from typing import Any

from flashdsa.jit.loader import installed_hash, installed_object
from flashdsa.jit.manifest import function_names, read_manifest
from flashdsa.jit.shared_object import is_from
from flashdsa.jit.user_cache import COMPILER, cache_folder, file_name, package_version
from flashdsa.kernels.catalog import BACKENDS, variants_of

INSTALLED, CACHED, COMPILED, NONE = "installed", "cached", "compiled at first use", "not here"


def kernel_origins() -> list[dict[str, Any]]:
    """One row a backend.

    Returns:
        backend; object, the path of the installed one, or None; state: "used", "of other sources"
        (not used), or "absent"; bytes; built_with, the tools by their versions; functions: name ->
        "installed", "cached", "compiled at first use" or "not here".
    """
    return [_origins_of(backend) for backend in BACKENDS]


def _origins_of(backend: str) -> dict[str, Any]:
    path = installed_object(backend)
    state = "absent"
    there: set[str] = set()
    if path.exists():
        state = "used" if is_from(path, installed_hash(backend)) else "of other sources"
        there = set(function_names(path)) if state == "used" else set()
    otherwise = NONE if package_version(COMPILER) is None else COMPILED
    kept = _cached_names()
    functions = {}
    for name, variant in variants_of(backend).items():
        if name in there:
            functions[name] = INSTALLED
        elif file_name(variant) in kept:
            functions[name] = CACHED
        else:
            functions[name] = otherwise
    manifest = read_manifest(path.parent) or {}
    return {
        "backend": backend,
        "object": str(path) if path.exists() else None,
        "state": state,
        "bytes": path.stat().st_size if path.exists() else 0,
        "built_with": manifest.get("built_with", {}),
        "functions": functions,
    }


def _cached_names() -> set[str]:
    """Return the names of the files in this user's cache; none if it has none."""
    try:
        return {path.name for path in cache_folder().iterdir()}
    except OSError:
        return set()
