"""Where a demo runs: on the GPU only if kernels serve every operation there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from examples.demo.run import HOPPER, SIZES, V4_SIZES, choose_device, run_demo
from examples.demo.train import DemoOptions
from flashdsa.backends.catalog import registry
from flashdsa.kernels.catalog import INDEXER


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
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, backend: str, device: str
) -> None:
    pretend(monkeypatch, capability)
    assert choose_device("auto", backend) == device


def test_auto_obeys_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, HOPPER)
    monkeypatch.setenv("FLASHDSA_BACKEND", "cpu")
    assert choose_device("auto", "auto") == "cpu"


def test_a_device_that_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None)
    with pytest.raises(ValueError, match=r"device: expected auto or cpu: .* got 'cuda'"):
        choose_device("cuda", "auto")


def test_hopper_alone_has_kernels_for_every_operation_of_the_demo(tiny: DemoOptions) -> None:
    served = list(run_demo(replace(tiny, form="v4", topk=16))["served"])

    def has_kernels(operation: str, capability: tuple[int, int]) -> bool:
        found = [one.features for one in registry.implementations(operation)]
        return any("cuda" in f.devices and capability in f.capabilities for f in found)

    assert all(has_kernels(one, HOPPER) for one in served)
    assert not all(has_kernels(one, (10, 0)) for one in served)


def test_default_sizes_on_a_gpu_are_those_of_compiled_kernels() -> None:
    for sizes in (SIZES["cuda"], V4_SIZES["cuda"]):
        assert sizes["topk"] <= INDEXER.plans[0].lists.most_topk
        assert sizes["num_heads"] in (8, 16, 32, 64, 128)
