"""Where a demo runs, and which backends and kernels served it there."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashdsa.backends.catalog import registry
from flashdsa.backends.registry import resolve_backend
from flashdsa.demo.options import DEVICES
from flashdsa.jit.loader import loaded_variants
from flashdsa.problem import Operation

OPERATIONS = (
    Operation.QUANTIZE_INDEX_Q,
    Operation.QUANTIZE_INDEX_K,
    Operation.DSA_TOPK_PREFILL,
    Operation.SPARSE_MLA_FWD,
    Operation.MLA_BWD,
    Operation.ATTENTION_TARGET,
    Operation.INDEXER_SCORES,
    Operation.INDEXER_KL,
    Operation.INDEXER_KL_BWD,
    Operation.INDEXER_BWD,
    Operation.WRITE_INDEX_K_CACHE,
    Operation.DSA_TOPK_INDEXER,
)
"""What training calls, and behind it the evaluation."""


@dataclass(frozen=True)
class Served:
    """An operation and what computed it.

    Attributes:
        kernels: names of the compiled functions that this process has loaded for the operation;
            none where the backend is no GPU's.
    """

    operation: str
    backend: str
    kernels: tuple[str, ...]


def choose_device(device: str, backend: str) -> str:
    """The device that `device` names; for "auto" the GPU if it serves all of the demo's operations.

    Args:
        device: "auto" or one of `DEVICES`.
        backend: of the demo's operations; one that runs on the CPU keeps "auto" there.

    Raises:
        ValueError: no such device, or "cuda" where torch finds no GPU.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() and _gpu_serves(backend) else "cpu"
    require_device(device)
    return device


def require_device(device: str) -> None:
    """Raise ValueError unless tensors can be on `device`, one of `DEVICES`."""
    if device not in DEVICES:
        raise ValueError(f"device: expected auto or one of {', '.join(DEVICES)}; got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device: expected auto or cpu, since torch {torch.__version__} finds no CUDA GPU on "
            "this machine; got 'cuda'"
        )


def device_name(device: str) -> str:
    """What the machine calls the device."""
    return torch.cuda.get_device_name() if device == "cuda" else "the CPU"


def _gpu_serves(backend: str) -> bool:
    capability = torch.cuda.get_device_capability()
    names = {
        operation: {
            one.backend
            for one in registry.implementations(operation)
            if "cuda" in one.features.devices and one.features.capability in (None, capability)
        }
        for operation in OPERATIONS
    }
    backend = resolve_backend(backend)
    return all(found if backend == "auto" else backend in found for found in names.values())


def served_operations(device: str, backend: str) -> tuple[Served, ...]:
    """What served this process's calls with tensors of `device`, where they named `backend` or
    "auto"."""
    chosen = registry.chosen(device, "auto") | registry.chosen(device, backend)
    return tuple(
        Served(operation.value, chosen[operation], _kernels(operation, chosen[operation]))
        for operation in OPERATIONS
        if operation in chosen
    )


def _kernels(operation: Operation, backend: str) -> tuple[str, ...]:
    names = (
        one.name
        for one in loaded_variants()
        if one.spec.backend == backend and operation in one.spec.operations
    )
    return tuple(dict.fromkeys(names))
