"""The launch that sorts lists of ids by their scores."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from flashdsa.backends.runner import Runner
from flashdsa.plan.kernel_spec import KernelSpec


def bind_order(runner: Runner, spec: KernelSpec, topk: int) -> Callable[..., None]:
    """Load the narrowest kernel for lists of `topk` ids: a function of `launch_order`'s tensors."""
    wide_enough = (plan for plan in spec.plans if plan.width >= topk)
    return runner.function(spec, min(wide_enough, key=attrgetter("width")))
