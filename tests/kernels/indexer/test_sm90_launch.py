"""Which workspace a launch gets, by stream, size and graph capture; on a pretended GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi")

from flashdsa.backends.sm90 import indexer, workspace
from tests.kernels.indexer.exact_inputs import Inputs, make_inputs


@dataclass
class Gpu:
    """What the backend asks torch about, and the launches that it made."""

    stream: int = 7
    capturing: bool = False
    device: int = 0
    launches: list[tuple[Any, ...]] = field(default_factory=list)

    def launched(self, *arguments: Any) -> None:
        """In the kernel's place."""
        self.launches.append(arguments)

    def addresses(self) -> list[tuple[int, int]]:
        """Of the counters and the lists of every launch."""
        return [
            (torch.from_dlpack(a[6]).data_ptr(), torch.from_dlpack(a[7]).data_ptr())
            for a in self.launches
        ]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    pretended = Gpu()

    class OnDevice:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            self.before, pretended.device = pretended.device, self.index

        def __exit__(self, *_: object) -> None:
            pretended.device = self.before

    real_zeros, real_empty = torch.zeros, torch.empty

    def here(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *shape, **options: make(*shape, **{**options, "device": "cpu"})

    c, cuda = torch._C, torch.cuda
    for owner, name, value in (
        (c, "_cuda_isCurrentStreamCapturing", lambda: pretended.capturing),
        (c, "_cuda_getCurrentRawStream", lambda _: pretended.stream),
        (cuda, "current_device", lambda: pretended.device),
        (cuda, "device_count", lambda: 2),
        (cuda, "device", OnDevice),
        (cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=2)),
        (indexer, "indexer_function", lambda _: pretended.launched),
        (workspace, "_kept", {}),
        (torch, "zeros", here(real_zeros)),
        (torch, "empty", here(real_empty)),
    ):
        monkeypatch.setattr(owner, name, value, raising=False)
    indexer.prepare.cache_clear()
    yield pretended
    indexer.prepare.cache_clear()


def launch(inputs: Inputs) -> torch.Tensor:
    prepared = indexer.prepare(torch.device("cuda", 0), 16, 512)
    ids = inputs.output(512)
    prepared.launch(*inputs, ids)
    return ids


def rows(count: int) -> Inputs:
    return make_inputs([600] * count, num_heads=16)


def test_launches_of_a_stream_share_a_workspace_until_more_rows_come(gpu: Gpu) -> None:
    for count in (3, 2, 1024, 1025, 3):
        launch(rows(count)) if count < 10 else launch(_many(count))
    first, second, third, larger, after = gpu.addresses()
    assert first == second == third
    assert larger != first
    assert after == larger
    assert [a[8] for a in gpu.launches] == [2] * 5


def _many(count: int) -> Inputs:
    one = rows(1)
    return Inputs(*(x if x.dim() == 4 else x.repeat(count, *[1] * (x.dim() - 1)) for x in one))


def test_another_stream_gets_another_workspace(gpu: Gpu) -> None:
    launch(rows(2))
    gpu.stream = 8
    launch(rows(2))
    gpu.stream = 7
    launch(rows(2))
    first, other, again = gpu.addresses()
    assert first == again
    assert not set(first) & set(other)


def test_a_captured_launch_has_a_workspace_of_its_own(gpu: Gpu) -> None:
    launch(rows(2))
    gpu.capturing = True
    launch(rows(2))
    launch(rows(2))
    gpu.capturing = False
    launch(rows(2))
    before, captured, captured_too, after = gpu.addresses()
    assert before == after
    assert not set(before) & set(captured)
    assert captured != captured_too


def test_variants_share_the_memory_of_a_stream(gpu: Gpu) -> None:
    launch(rows(2))
    other = indexer.prepare(torch.device("cuda", 0), 16, 512, True)
    other.launch(*rows(2), rows(2).output(512))
    assert gpu.addresses()[0] == gpu.addresses()[1]


def test_nothing_is_launched_without_rows_or_pages(gpu: Gpu) -> None:
    inputs = rows(2)
    assert launch(Inputs(*(x if x.dim() == 4 else x[:0] for x in inputs))).shape == (0, 512)
    no_pages = inputs._replace(k_index_cache_fp8=inputs.k_index_cache_fp8[:0])
    assert (launch(no_pages) == -1).all()
    launch(inputs)
    assert (launch(no_pages) == -1).all()
    assert len(gpu.launches) == 1


def test_an_int8_cache_goes_in_as_bytes_and_the_current_device_comes_back(gpu: Gpu) -> None:
    gpu.device = 1
    inputs = rows(2)
    launch(inputs._replace(k_index_cache_fp8=inputs.k_index_cache_fp8.view(torch.int8)))
    assert gpu.launches[0][1].dtype is torch.uint8
    assert gpu.device == 1


def test_checked_calls_check_addresses_and_where_asked_values(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = indexer.prepare(torch.device("cuda", 0), 16, 512).checked
    inputs = rows(2)
    shifted = torch.zeros(2 * 16 + 1)[1:].view(2, 16)
    shifted = shifted if shifted.data_ptr() % 16 else torch.zeros(2 * 16 + 2)[2:].view(2, 16)
    with pytest.raises(NotImplementedError, match=r"weights: .* aligned to 16 bytes"):
        checked(*inputs._replace(weights=shifted), inputs.output(512), True)
    inputs.seq_lens[1] = -4
    checked(*inputs, inputs.output(512), True)
    monkeypatch.setenv("FLASHDSA_CHECK", "1")
    checked(*inputs, inputs.output(512), False)
    assert len(gpu.launches) == 2
    with pytest.raises(ValueError, match=r"seq_lens\[1\] = -4"):
        checked(*inputs, inputs.output(512), True)
    gpu.capturing = True
    checked(*inputs, inputs.output(512), True)
    assert len(gpu.launches) == 3
