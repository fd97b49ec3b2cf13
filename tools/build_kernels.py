"""`make kernels`: compile every kernel into the shared object that package and wheel carry."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from flashdsa.jit.functions import INSTALLED
from flashdsa.jit.shared_object import build_shared_object, is_from
from flashdsa.jit.sources import source_hash
from flashdsa.jit.variants import sm90_variants


def main() -> None:
    """Build, unless the object is there and of these sources."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=INSTALLED, help=f"default: {INSTALLED}")
    parser.add_argument("--only", default="", help="names that contain this")
    arguments = parser.parse_args()
    sources = source_hash()
    if not arguments.only and is_from(arguments.target, sources):
        print(f"{arguments.target} is up to date")
        return
    start = time.perf_counter()
    variants = {n: make for n, make in sm90_variants().items() if arguments.only in n}
    compiled = {}
    for number, (name, compile_now) in enumerate(variants.items(), 1):
        compiled[name] = compile_now()
        print(f"{number}/{len(variants)} {name} {time.perf_counter() - start:.0f} s", flush=True)
    build_shared_object(arguments.target, compiled, sources)
    size = arguments.target.stat().st_size / 1e6
    print(f"{arguments.target}: {size:.1f} MB in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
