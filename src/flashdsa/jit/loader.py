"""Compiled kernels by plan: from the installed object, this user's cache, or the compiler."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flashdsa.errors import UnsupportedError
from flashdsa.jit.manifest import described
from flashdsa.jit.shared_object import build_shared_object, is_from, load_shared_object
from flashdsa.jit.sources import PACKAGE, package_hash, source_hash
from flashdsa.kernels.catalog import variants_of
from flashdsa.plan.kernel_spec import KernelPlan, KernelSpec, Variant
from flashdsa.row_formats import SHIPPED

logger = logging.getLogger("flashdsa.jit")

INSTALLED = PACKAGE / "_kernels"
"""The shared objects that `make kernels` makes and wheels carry, one a backend."""

INSTALLED_KERNEL, CACHED_KERNEL, COMPILED_KERNEL = "installed", "cached", "compiled"
"""Origins of a kernel that a process has loaded."""

_loaded: dict[Variant, str] = {}
"""Origins by variant, in the order of the variants' first use."""


@cache
def load(spec: KernelSpec, plan: KernelPlan) -> Callable[..., Any]:
    """The plan's function; it is compiled if necessary, once for each user and version.

    Processes that want it at the same time wait for the first one, which compiles it.

    Args:
        plan: one of the catalog's, or of packed rows of a user's format.

    Raises:
        ValueError: see `require_plan`.
        UnsupportedError: it must be compiled and nvidia-cutlass-dsl is not installed.
    """
    require_plan(spec, plan)
    variant = Variant(spec, plan)
    function, _loaded[variant] = _found(variant)
    return function


def require_plan(spec: KernelSpec, plan: KernelPlan) -> None:
    """Check that a function is compiled for the catalog's plans, or for packed rows of a format
    that is not shipped under a name of its own.

    Raises:
        ValueError: for neither; another plan's function would be taken by the name.
    """
    is_own = getattr(plan, "form", None) not in (None, *SHIPPED)
    if plan not in spec.plans and not (is_own and plan.name not in variants_of(spec.backend)):
        raise ValueError(f"{spec.name}: compiled for its catalog's plans only; got {plan}")


def loaded_variants() -> tuple[Variant, ...]:
    """Variants of all kernels that this process has asked for, in the order of their first use."""
    return tuple(_loaded)


def loaded_origins() -> Counter[str]:
    """Return how many kernels this process has loaded, by their origin: "installed" (from the
    wheel, or by `make kernels`), "cached" (compiled by an earlier process), or "compiled"."""
    return Counter(_loaded.values())


def _found(variant: Variant) -> tuple[Callable[..., Any], str]:
    """The function from the installed object, the cache, or the compiler, and which of these."""
    spec = variant.spec
    installed = _installed(spec.backend, installed_object(spec.backend))
    if installed is not None:
        try:
            return _function(installed, variant.name), INSTALLED_KERNEL
        except AttributeError:
            logger.info("%s is not in %s", variant.name, installed_object(spec.backend))
    sources = source_hash([variant])
    cached = cache_folder() / f"{variant.name}-{sources}.so"
    if is_from(cached, sources):
        return _function(load_shared_object(cached), variant.name), CACHED_KERNEL
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        logger.info("no C compiler: %s serves this process only", variant.name)
        return _compile(variant), COMPILED_KERNEL
    from filelock import FileLock  # 20 ms, which a process that compiles nothing does not pay

    lock = FileLock(cached.with_suffix(".lock"))
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        logger.warning("%s serves this process only: %s", variant.name, error)
        return _compile(variant), COMPILED_KERNEL
    try:
        return _compile_and_keep(variant, cached, sources)
    finally:
        lock.release()


def _compile_and_keep(
    variant: Variant, cached: Path, sources: str
) -> tuple[Callable[..., Any], str]:
    """The function, from a file that exists afterwards, and its origin; the caller holds the file's
    lock."""
    origin = CACHED_KERNEL
    if not is_from(cached, sources):
        logger.info("compiling %s, once; it will be in %s", variant.name, cached.parent)
        compiled, origin = _compile(variant), COMPILED_KERNEL
        try:
            build_shared_object(cached, {variant.name: compiled}, sources)
        except OSError as error:
            logger.warning("%s serves this process only: %s", variant.name, error)
            return compiled, origin
    return _function(load_shared_object(cached), variant.name), origin


def _compile(variant: Variant) -> Callable[..., Any]:
    start = time.perf_counter()
    compiled = compile_plan(*variant)
    logger.info("compiled %s in %.1f s", variant.name, time.perf_counter() - start)
    return compiled


def compile_plan(spec: KernelSpec, plan: KernelPlan) -> Callable[..., Any]:
    """Compile any plan of the kernel with CuTe DSL, in this process; seconds, no GPU.

    Raises:
        UnsupportedError: nvidia-cutlass-dsl is not installed.
    """
    require_compiler()
    module, _, function = spec.build.partition(":")
    compiled: Callable[..., Any] = getattr(import_module(module), function)(plan)
    return compiled


def require_kernels(backend: str) -> None:
    """Raise UnsupportedError if a backend's kernels are neither installed nor can be compiled."""
    if _installed(backend, installed_object(backend)) is None:
        require_compiler()


def require_compiler() -> None:
    """Raise UnsupportedError if CuTe DSL is not installed."""
    if find_spec("cutlass") is None:
        raise UnsupportedError(
            "compiling kernels needs CuTe DSL: pip install 'nvidia-cutlass-dsl>=4.8,<5'; "
            "or install a wheel that carries them"
        )


def installed_object(backend: str) -> Path:
    """Path of the backend's installed object of compiled kernels."""
    return INSTALLED / f"{backend}.so"


def installed_hash(backend: str) -> str:
    """Hash of the sources that the installed object must be made from."""
    known = described(installed_object(backend))
    if known.get("package") == package_hash():  # 16 ms, not 300
        return str(known["sources"])
    return source_hash(list(variants_of(backend).values()))


@lru_cache
def _installed(backend: str, path: Path) -> Callable[[str], Any] | None:
    """The functions of the installed object; None if it does not exist or has other sources."""
    if not path.exists():
        return None
    if not is_from(path, installed_hash(backend)):
        logger.warning("%s was built from other sources and is not used: make kernels", path)
        return None
    return load_shared_object(path)


def _function(module: Callable[[str], Any], name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = module(name)
    return function


def cache_folder() -> Path:
    """Folder that keeps compiled kernels between processes."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "flashdsa"
