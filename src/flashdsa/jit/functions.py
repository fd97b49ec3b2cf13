"""Compiled kernels by plan: from the installed object, this user's cache, or the compiler."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from flashdsa.errors import UnsupportedError
from flashdsa.jit.shared_object import build_shared_object, is_from, load_shared_object
from flashdsa.jit.sources import PACKAGE, source_hash
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan

logger = logging.getLogger("flashdsa.jit")

INSTALLED = PACKAGE / "_kernels" / "sm90.so"
"""Hopper's kernels, made by `make kernels`, carried by wheels."""


def installed_object(arch: str) -> Path:
    """Where an architecture's kernels are; those of others lie beside Hopper's."""
    return INSTALLED if arch == "sm90" else INSTALLED.with_name(f"{arch}.so")


def indexer_name(plan: IndexerPlan) -> str:
    """The exported name of the plan's function."""
    kinds = [kind for kind in ("sorted", "teams", "dealt") if getattr(plan, kind)]
    return "_".join((f"indexer_h{plan.num_heads}_k{plan.topk}", *kinds))


def indexer_function(plan: IndexerPlan) -> Any:
    """The plan's function; compiles it if need be, once a user and version.

    Raises:
        UnsupportedError: it must be compiled and nvidia-cutlass-dsl is not installed.
    """
    return function_named(indexer_name(plan), lambda: compile_plan(plan))


def function_named(name: str, compile_now: Callable[[], Any], arch: str = "sm90") -> Any:
    """An exported function: installed, else of this user's cache, else compiled and kept there.

    Args:
        compile_now: compiles it, as `cute.compile` with `--enable-tvm-ffi` does.
        arch: whose object has it, and whose sources it is compiled from.
    """
    path, sources = installed_object(arch), source_hash(arch=arch)
    installed = _installed(path, sources)
    if installed is not None:
        try:
            return installed(name)
        except AttributeError:
            logger.info("%s is not in %s", name, path)
    cached = cache_folder() / f"{name}-{sources}.so"
    if is_from(cached, sources):
        return load_shared_object(cached)(name)
    logger.info("compiling %s, once; it will be in %s", name, cached.parent)
    start = time.perf_counter()
    compiled = compile_now()
    logger.info("compiled %s in %.1f s", name, time.perf_counter() - start)
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        logger.info("no C compiler: %s serves this process only", name)
        return compiled
    try:
        build_shared_object(cached, {name: compiled}, sources)
    except OSError as error:
        logger.warning("%s serves this process only: %s", name, error)
        return compiled
    return load_shared_object(cached)(name)


def compile_plan(plan: IndexerPlan) -> Any:
    """Compile with CuTe DSL; seconds."""
    try:
        from flashdsa.kernels.indexer.sm90.build import compile_indexer
    except ImportError as error:
        raise UnsupportedError(
            "compiling kernels needs CuTe DSL: pip install 'flashdsa[cuda]'; "
            f"or install a wheel that carries them ({error})"
        ) from error
    return compile_indexer(plan)


@lru_cache
def _installed(path: Path, sources: str) -> Callable[[str], Any] | None:
    """The functions of the installed object; None where there is none of these sources."""
    if not path.exists():
        return None
    if not is_from(path, sources):
        logger.warning("%s was built from other sources and is not used: make kernels", path)
        return None
    return load_shared_object(path)


def cache_folder() -> Path:
    """Where compiled kernels are kept between processes."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "flashdsa"
