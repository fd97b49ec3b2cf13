"""What compiled kernels are made from, as one hash: an object of other sources is never loaded."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
_COMPILED_FROM = ("dsl", "plan", "hw", "jit", "problem.py")
"""Files and folders of the package that can change what a kernel does or how it is called."""
_KERNELS = {
    "sm90": ("kernels/indexer",),
    "sm100": ("kernels/sparse_mla",),
}
"""The kernels' own, and whose code they use, by architecture."""


@lru_cache
def source_hash(package: Path = PACKAGE, arch: str = "sm90") -> str:
    """Changes with any of the sources of the architecture's kernels, their names included."""
    digest = hashlib.sha256()
    for part in (*_KERNELS[arch], *_COMPILED_FROM):
        start = package / part
        for path in [start] if start.is_file() else sorted(start.rglob("*")):
            if path.suffix in (".py", ".c"):
                digest.update(f"{path.relative_to(package).as_posix()}\n".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
