"""Compiled kernels by plan: from the installed object, this user's cache, or the compiler."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashdsa.errors import UnsupportedError
from flashdsa.jit.manifest import described
from flashdsa.jit.shared_object import build_shared_object, is_from, is_intact, load_shared_object
from flashdsa.jit.sources import PACKAGE, package_hash, source_hash
from flashdsa.jit.user_cache import (
    cache_folder,
    cache_key,
    delete_leftovers,
    file_name,
    make_private,
    require_own,
)
from flashdsa.kernels.catalog import BACKENDS, variants_of
from flashdsa.plan.kernel_spec import KernelPlan, KernelSpec, Variant
from flashdsa.row_formats import SHIPPED

if TYPE_CHECKING:
    from filelock import BaseFileLock

logger = logging.getLogger("flashdsa.jit")

QUIET_SECONDS, WAIT_SECONDS = 30, 300
"""Time that a process waits for another one's compilation: until it says so, and at most."""

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
    try:
        folder, name = cache_folder(), file_name(variant)
        make_private(folder)
        function = _kept(variant, folder / name)
        if function is not None:
            return function, CACHED_KERNEL
        if shutil.which("gcc") is None and shutil.which("cc") is None:
            logger.info("no C compiler: %s serves this process only", variant.name)
            return _compile(variant), COMPILED_KERNEL
        lock = _locked((folder / name).with_suffix(".lock"))
    except OSError as error:
        logger.warning("%s serves this process only: %s", variant.name, error)
        return _compile(variant), COMPILED_KERNEL
    try:
        return _compile_and_keep(variant, folder / name)
    finally:
        lock.release()


def _locked(path: Path) -> BaseFileLock:
    """Return the lock at `path`, which is held.

    Raises:
        TimeoutError: another process holds it for `WAIT_SECONDS`.
        OSError: it cannot be locked.
    """
    from filelock import FileLock, Timeout  # 20 ms, which others than the first do not pay

    lock = FileLock(path)
    try:
        lock.acquire(timeout=QUIET_SECONDS)
    except Timeout:
        logger.warning("waiting for another process, which holds %s", path)
        lock.acquire(timeout=WAIT_SECONDS - QUIET_SECONDS)
    return lock


def _kept(variant: Variant, cached: Path) -> Callable[..., Any] | None:
    """Return the function of a cached object; None if there is none that can be used.

    An object that is damaged or cannot be loaded is removed, so that it is compiled again, once.
    """
    try:
        require_own(cached)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("not loaded: %s", error)
        return None
    if is_from(cached, cache_key(variant)) and is_intact(cached):
        try:
            function = _function(load_shared_object(cached), variant.name)
        except UnsupportedError:
            raise
        except (OSError, RuntimeError, AttributeError) as error:
            logger.warning("%s cannot be loaded, and is removed: %s", cached, error)
        else:
            with suppress(OSError):
                os.utime(cached)
            return function
    else:
        logger.warning("%s is damaged, and is removed", cached)
    with suppress(OSError):  # a folder that cannot be written
        cached.unlink()
    return None


def _compile_and_keep(variant: Variant, cached: Path) -> tuple[Callable[..., Any], str]:
    """Return the function and its origin, from a file that exists afterwards if it can be written;
    the caller holds the file's lock."""
    function = _kept(variant, cached)
    if function is not None:
        return function, CACHED_KERNEL
    logger.info("compiling %s, once; it will be in %s", variant.name, cached.parent)
    compiled = _compile(variant)
    try:
        build_shared_object(cached, {variant.name: compiled}, cache_key(variant))
        current = {file_name(one) for name in BACKENDS for one in variants_of(name).values()}
        delete_leftovers(cached.parent, current | {cached.name})
    except Exception as error:  # of the disk, of gcc: the kernel itself is there
        logger.warning("%s serves this process only: %s", variant.name, error)
    return _kept(variant, cached) or compiled, COMPILED_KERNEL


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
    try:
        return load_shared_object(path)
    except UnsupportedError:
        raise
    except (OSError, RuntimeError) as error:  # of another machine, in a home that both have
        logger.warning("%s cannot be loaded and is not used: %s", path, error)
        return None


def _function(module: Callable[[str], Any], name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = module(name)
    return function
