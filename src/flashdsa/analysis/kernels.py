"""The kernels of ours that can be inspected by name."""

from __future__ import annotations

from importlib import import_module

from flashdsa.errors import ArgumentValueError
from flashdsa.plan.inspected import InspectedKernel

_KERNELS = {
    ("indexer", "sm_90a"): "kernels.indexer.sm90.inspection:indexer",
    ("indexer_logits", "sm_90a"): "kernels.indexer.sm90.inspection:indexer_logits",
    ("topk_indices", "sm_90a"): "kernels.indexer.sm90.inspection:topk_indices",
    ("quantize_index", "sm_90a"): "kernels.indexer.sm90.inspection:quantize_index",
    ("write_index_k_cache", "sm_90a"): "kernels.indexer.sm90.inspection:write_index_k_cache",
    ("mla_bwd", "sm_100a"): "kernels.sparse_mla.sm100.bwd.inspection:mla_bwd",
    (
        "mla_bwd_deterministic",
        "sm_100a",
    ): "kernels.sparse_mla.sm100.bwd.inspection:mla_bwd_deterministic",
    ("majorness", "sm_90a"): "lab.kernels.majorness.inspection:sm90",
    ("majorness", "sm_100a"): "lab.kernels.majorness.inspection:sm100",
    ("operand_form", "sm_100a"): "lab.kernels.operand_forms.sm100.inspection:operand_form",
}
"""(name, architecture) -> module in flashdsa, function that gives the InspectedKernel."""


def kernel_names() -> tuple[str, ...]:
    """The names, each once."""
    return tuple(dict.fromkeys(name for name, _ in _KERNELS))


def inspected_kernel(name: str, arch: str | None) -> InspectedKernel:
    """The kernel of that name; `arch` None: of the only architecture that it is written for.

    Raises:
        ArgumentValueError: there is none; says which there are.
    """
    archs = [known for kernel, known in _KERNELS if kernel == name]
    if not archs:
        names = ", ".join(kernel_names())
        raise ArgumentValueError(
            f"{name}: no kernel of that name and no such file; kernels: {names}"
        )
    if arch is None and len(archs) > 1:
        raise ArgumentValueError(f"{name}: --arch is needed, one of {', '.join(archs)}")
    arch = arch or archs[0]
    if arch not in archs:
        raise ArgumentValueError(f"{name}: written for {', '.join(archs)}; got --arch {arch}")
    module, _, function = _KERNELS[name, arch].partition(":")
    found: InspectedKernel = getattr(import_module(f"flashdsa.{module}"), function)()
    return found
