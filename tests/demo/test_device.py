"""Where a demo runs: on the GPU only if that serves every operation, and said before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flashdsa.demo import DemoOptions, run_demo
from flashdsa.demo.device import OPERATIONS, Served, choose_device, served_operations
from flashdsa.demo.options import SIZES
from flashdsa.kernels.catalog import INDEXER, PREFILL


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHDSA_BACKEND", raising=False)


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    """A GPU of that compute capability; None: there is none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


@pytest.mark.parametrize(
    ("capability", "backend", "device"),
    [
        (None, "auto", "cpu"),
        ((9, 0), "auto", "cuda"),
        ((9, 0), "sm90", "cuda"),
        ((9, 0), "cpu", "cpu"),
        ((9, 0), "emulate-sm90", "cpu"),
        ((8, 0), "auto", "cpu"),
        ((10, 0), "auto", "cpu"),  # no dsa_topk_prefill yet
    ],
)
def test_auto_takes_a_gpu_that_serves_every_operation(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int] | None,
    backend: str,
    device: str,
) -> None:
    pretend(monkeypatch, capability)
    assert choose_device("auto", backend) == device


def test_auto_obeys_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (9, 0))
    monkeypatch.setenv("FLASHDSA_BACKEND", "cpu")
    assert choose_device("auto", "auto") == "cpu"


def test_a_device_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, None)
    message = r"device: expected auto or cpu, .* finds no CUDA GPU on this machine; got 'cuda'"
    with pytest.raises(ValueError, match=message):
        choose_device("cuda", "auto")
    with pytest.raises(ValueError, match=message):
        run_demo(DemoOptions.on("cuda", picture=tmp_path / "demo.png"))
    with pytest.raises(ValueError, match="device: expected auto or one of cpu, cuda; got 'tpu'"):
        choose_device("tpu", "auto")


def test_sizes_suit_the_device_where_they_are_not_given() -> None:
    assert DemoOptions.on("cpu", window=None) == DemoOptions()
    on_gpu = DemoOptions.on("cuda", topk=1024, num_heads=None)
    assert (on_gpu.device, on_gpu.topk) == ("cuda", 1024)
    assert on_gpu.num_heads == SIZES["cuda"]["num_heads"]


def test_default_sizes_on_a_gpu_are_those_of_compiled_kernels() -> None:
    sizes = SIZES["cuda"]
    assert any(plan.topk == sizes["topk"] for plan in INDEXER.plans)
    assert sizes["num_heads"] in (8, 16, 32, 64, 128)
    assert PREFILL.operations[0] in OPERATIONS


def test_what_served_names_backends_and_loaded_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashdsa.demo import device

    asked: list[tuple[str, str]] = []

    def chosen(kind: str, backend: str) -> dict[Any, str]:
        asked.append((kind, backend))
        return {OPERATIONS[2]: "sm90"} if backend == "sm90" else {OPERATIONS[0]: "cpu"}

    monkeypatch.setattr(device.registry, "chosen", chosen)
    monkeypatch.setattr(device, "loaded_variants", lambda: (PREFILL.variants[0],) * 2)
    assert served_operations("cuda", "sm90") == (
        Served("quantize_index_q", "cpu", ()),
        Served("dsa_topk_prefill", "sm90", (PREFILL.variants[0].name,)),
    )
    assert asked == [("cuda", "auto"), ("cuda", "sm90")]
