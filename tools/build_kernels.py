"""`make kernels`: compile every kernel into the shared objects that package and wheel carry."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from flashdsa.jit.loader import compile_plan, installed_hash, installed_object
from flashdsa.jit.manifest import describe, write_manifest
from flashdsa.jit.shared_object import build_shared_object, is_from
from flashdsa.kernels.catalog import BACKENDS, variants_of


def main() -> None:
    """Build what is not there, or not of these sources."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", choices=BACKENDS, help="default: all of them")
    parser.add_argument("--target", type=Path, help="with --arch; default: in the package")
    parser.add_argument("--only", default="", help="names that contain this")
    arguments = parser.parse_args()
    if arguments.target and not arguments.arch:
        parser.error("--target: needs --arch")
    for backend in [arguments.arch] if arguments.arch else BACKENDS:
        target = arguments.target or installed_object(backend)
        build(backend, target, arguments.only)
        if target.parent.exists():
            write_manifest(target.parent)


def build(backend: str, target: Path, only: str) -> None:
    """One backend's object, unless it is there, of these sources and with every function."""
    sources = installed_hash(backend)
    if not only and is_from(target, sources) and is_whole(backend, target):
        print(f"{target} is up to date")
        return
    start = time.perf_counter()
    variants = {name: one for name, one in variants_of(backend).items() if only in name}
    if not variants:
        print(f"{backend}: no name contains {only!r}")
        return
    compiled = {}
    for number, (name, variant) in enumerate(variants.items(), 1):
        compiled[name] = compile_plan(*variant)
        print(f"{number}/{len(variants)} {name} {time.perf_counter() - start:.0f} s", flush=True)
    build_shared_object(target, compiled, sources)
    size = target.stat().st_size / 1e6
    print(f"{target}: {size:.1f} MB in {time.perf_counter() - start:.0f} s")


def is_whole(backend: str, target: Path) -> bool:
    """Whether an object has all functions of a backend, which one made with --only has not."""
    return set(variants_of(backend)) <= set(describe(target)["functions"])


if __name__ == "__main__":
    main()
