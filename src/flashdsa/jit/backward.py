"""The compiled Blackwell backward of sparse MLA."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from flashdsa.errors import UnsupportedError
from flashdsa.jit.functions import function_named
from flashdsa.kernels.sparse_mla.sm100.bwd.plan import BwdPlan


def backward_name(deterministic: bool) -> str:
    """The exported name of a variant."""
    return "mla_bwd" + ("_deterministic" if deterministic else "")


@lru_cache
def backward_function(deterministic: bool = False) -> Any:
    """The function that `compile_backward` describes; compiles it once a user and version.

    Raises:
        UnsupportedError: it must be compiled and nvidia-cutlass-dsl is not installed.
    """
    return function_named(
        backward_name(deterministic), lambda: compile_backward(BwdPlan(), deterministic), "sm100"
    )


def compile_backward(plan: BwdPlan, deterministic: bool = False) -> Any:
    """Compile with CuTe DSL; seconds."""
    try:
        from flashdsa.kernels.sparse_mla.sm100.bwd import build
    except ImportError as error:
        raise UnsupportedError(
            "compiling kernels needs CuTe DSL: pip install 'flashdsa[cuda]'; "
            f"or install a wheel that carries them ({error})"
        ) from error
    return build.compile_backward(plan, deterministic)
