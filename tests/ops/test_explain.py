"""`flashdsa.explain`: which backend and kernels serve a call's tensors, and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa.backends.catalog import registry
from flashdsa.backends.emulated.devices import H200
from flashdsa.backends.emulated.runner import running_on
from flashdsa.backends.recorder import Recorder
from flashdsa.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from tests.ops import inputs


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def packed_call(device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    q, kv = zeros(4, 64, 576, device=device), zeros(300, 656, dtype=torch.uint8, device=device)
    return q, kv, zeros(4, 64, dtype=torch.int32, device=device)


def test_a_call_on_the_cpu_is_the_cpus() -> None:
    found = flashdsa.explain("sparse_mla_fwd", *packed_call(), kv_format="v32", backend="auto")
    assert (found.backend, found.gpu, found.kernels, found.also) == ("cpu", "", (), ("torch",))
    assert found.function == "flashdsa.backends.cpu.sparse_mla:forward"
    assert set(found.refusals) == {"sm90", "sm100", "triton"}
    assert all(why == "device: takes cuda; got cpu" for why in found.refusals.values())
    first, *_ = str(found).splitlines()
    assert first == "sparse_mla_fwd: cpu; torch would serve it, too"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_named_backend_has_its_usual_gpu(device: str) -> None:
    call = packed_call(device)
    found = flashdsa.explain(flashdsa.sparse_mla_fwd, *call, backend="sm90")
    assert (found.backend, found.gpu) == ("sm90", "H200")
    assert found.kernels == ("mla_decode_heads16",)
    assert found.also == ("triton", "torch")
    assert found.refusals["sm100"] == "compute capability: takes 10.0 or 10.3; got 9.0"
    assert found.reasons == ("waves of items: 1; CTAs of an item: 1",)
    (choice,) = found.choices
    assert [x.taken for x in choice.candidates].count(True) == 1
    assert flashdsa.explain("sparse_mla_fwd", *call, backend="triton").gpu == "A100"
    with pytest.raises(UnsupportedError, match="kv_format: takes none; got v32"):
        flashdsa.explain("sparse_mla_fwd", *call, backend="sm100")


def test_tensors_without_values_need_a_gpus_name() -> None:
    call = packed_call("meta")
    assert flashdsa.explain("sparse_mla_fwd", *call, gpu="h200").backend == "sm90"
    with pytest.raises(UnsupportedError, match=r"device: takes .*; got meta"):
        flashdsa.explain("sparse_mla_fwd", *call)


def test_an_emulated_backend_is_explained_on_its_device() -> None:
    found = flashdsa.explain("sparse_mla_fwd", *packed_call(), backend="emulate-sm90")
    assert (found.backend, found.gpu) == ("emulate-sm90", "H200")
    assert found.kernels == ("mla_decode_heads16",)


def test_every_operation_is_explained_as_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are those that the call launches, with checked values, too."""
    monkeypatch.setenv("FLASHDSA_CHECK", "1")
    explained = set()
    for name, call in inputs.small_calls().items():
        if "," in name or not has_kernels(call.function.__name__):
            continue
        recorder, arguments = Recorder(H200), {**call.arguments, "backend": "emulate-sm90"}
        with running_on(recorder):
            try:
                call.function(**arguments)
            except UnsupportedError as error:
                with pytest.raises(UnsupportedError) as refused:
                    flashdsa.explain(call.function, **arguments)
                assert str(refused.value) == str(error)
                continue
        found = flashdsa.explain(call.function, **arguments)
        assert found.launches == dict(recorder.launches)
        explained.add(name)
    assert len(explained) > 5


def has_kernels(name: str) -> bool:
    found = {one.operation for one in registry.implementations() if one.backend == "sm90"}
    return name in found | {"sparse_mla"}


def test_nothing_is_computed_remembered_or_recorded() -> None:
    q, kv, indices = packed_call()
    before = registry.chosen("cuda", "sm90")
    out = torch.full((4, 64, 512), 7.0, dtype=torch.bfloat16)
    found = flashdsa.explain("sparse_mla_fwd", q, kv, indices, out=out, backend="sm90")
    assert found.operation == "sparse_mla_fwd_out" and bool((out == 7).all())
    assert registry.chosen("cuda", "sm90") == before
    rows = zeros(300, 576).requires_grad_()
    assert flashdsa.explain("sparse_mla", q, rows, indices, backend="sm90").backend == "sm90"


def test_ranges_and_other_forms_are_the_calls() -> None:
    q, kv, indices = zeros(3, 64, 512), zeros(2, 64, 512), zeros(3, 1, 64, dtype=torch.int64)
    pair = zeros(3, dtype=torch.int64), zeros(3, dtype=torch.int64)
    more: dict[str, Any] = {"extra_kv": zeros(9, 512), "extra_indices": pair}
    found = flashdsa.explain("sparse_mla_fwd", q, kv, indices, backend="sm90", **more)
    assert found.kernels == ("mla_decode_512_joined_single_cta",)
    assert found.sizes["S_kv"] == 128 and found.sizes["S_extra"] == 9


@pytest.mark.parametrize(
    ("arguments", "more", "error", "says"),
    [
        (("no_operation",), {}, ArgumentValueError, "operation: expected one of attention_target"),
        (("bind",), {}, ArgumentValueError, "operation: expected one of"),
        ((print,), {}, ArgumentTypeError, "operation: expected a function or its name"),
        ((7,), {}, ArgumentTypeError, "operation: expected a function or its name; got int"),
        (("sparse_mla", 1, 2, 3), {}, ArgumentTypeError, "q: expected a torch.Tensor"),
        (("sparse_mla", *packed_call()), {"gpu": "h900"}, ArgumentValueError, "gpu: expected one"),
        (("sparse_mla", *packed_call()), {"gpu": 9}, ArgumentTypeError, "gpu: expected a str"),
        (("sparse_mla", *packed_call()), {"backend": "sm80"}, ArgumentValueError, "backend: exp"),
        (("sparse_mla", *packed_call()), {"index_block": 3, "backend": "sm90"}, UnsupportedError,
         "index_block"),
    ],
)  # fmt: skip
def test_wrong_calls(arguments: Any, more: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        flashdsa.explain(*arguments, **more)
