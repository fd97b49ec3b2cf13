"""Dispatch: what a call needs is held against what is declared; the choice is explained."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from flashdsa.backends.catalog import registry as catalog
from flashdsa.backends.features import AtLeast, Features, OneOf, UpTo
from flashdsa.backends.registry import Implementation, Registry
from flashdsa.problem import Problem
from flashdsa.settings import BACKENDS

PROBLEM = Problem("mla_bwd", "cuda", "bfloat16", num_heads=128, d_qk=576, d_v=512, topk=2048)
SM90 = Features(
    devices=("cuda",),
    dtypes=("bfloat16",),
    num_heads=OneOf((64, 128)),
    d_qk=OneOf((576,)),
    d_v=OneOf((512,)),
    topk=UpTo(2048),
)
CPU = Features(devices=("cpu",), dtypes=("bfloat16", "float32"), attn_sink=True)


@pytest.fixture
def registry() -> Registry:
    table = Registry()
    table.register(Implementation("mla_bwd", "cpu", "math:sqrt", CPU))
    table.register(Implementation("mla_bwd", "sm90", "math:exp", SM90))
    table.register(Implementation("mla_bwd", "sm90", "math:log", SM90, priority=1))
    return table


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHDSA_BACKEND", raising=False)


def test_auto_takes_the_able_one_with_the_highest_priority(registry: Registry) -> None:
    assert registry.select(PROBLEM).bind == "math:log"
    on_cpu = dataclasses.replace(PROBLEM, device="cpu")
    assert registry.select(on_cpu).backend == "cpu"


def test_what_is_registered_later_is_chosen_though_the_problem_was_seen(registry: Registry) -> None:
    assert registry.select(PROBLEM).bind == "math:log"
    registry.register(Implementation("mla_bwd", "sm90", "math:cos", SM90, priority=2))
    assert registry.select(PROBLEM).bind == "math:cos"


def test_what_was_chosen_is_told_by_device_and_the_name_that_calls_gave(registry: Registry) -> None:
    assert registry.chosen("cuda") == {}
    registry.select(PROBLEM)
    registry.select(dataclasses.replace(PROBLEM, device="cpu"), "cpu")
    assert registry.chosen("cuda") == {"mla_bwd": "sm90"}
    assert registry.chosen("cpu") == {}
    assert registry.chosen("cpu", "cpu") == {"mla_bwd": "cpu"}


def test_environment_replaces_auto_only(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHDSA_BACKEND", "cpu")
    with pytest.raises(NotImplementedError, match="backend 'cpu' cannot serve"):
        registry.select(PROBLEM)
    assert registry.select(PROBLEM, "sm90").backend == "sm90"


def test_tensors_elsewhere_and_another_gpu_have_a_mend(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    for change in ({"device": "cpu"}, {"capability": (8, 0)}):
        problem = dataclasses.replace(PROBLEM, **change)
        newer = dataclasses.replace(SM90, capabilities=((9, 0),))
        registry.register(Implementation("mla_bwd", "sm100", "math:exp", newer))
        with pytest.raises(NotImplementedError, match=r": move the tensors, or backend='auto'$"):
            registry.select(problem, "sm100")
        with monkeypatch.context() as patch:
            patch.setenv("FLASHDSA_BACKEND", "sm100")
            with pytest.raises(NotImplementedError, match=r"or unset FLASHDSA_BACKEND$"):
                registry.select(problem)
    with pytest.raises(NotImplementedError) as error:
        registry.select(dataclasses.replace(PROBLEM, dtype="float32"), "sm90")
    assert "auto" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "cpu"}, "device: takes cuda; got cpu"),
        ({"dtype": "float32"}, "dtype: takes bfloat16; got float32"),
        ({"num_heads": 16}, "num_heads: takes 64, 128; got 16"),
        ({"d_qk": 512}, "d_qk: takes 576; got 512"),
        ({"d_v": 256}, "d_v: takes 512; got 256"),
        ({"topk": 4096}, "topk: takes 1 to 2048; got 4096"),
        ({"attn_sink": True}, "attn_sink: not supported"),
        ({"topk_length": True}, "topk_length: not supported"),
        ({"deterministic": True}, "deterministic: not supported"),
        ({"sorted": True}, "sorted: not supported"),
        ({"positions": True}, "positions: not supported"),
    ],
)
def test_explicit_choice_says_which_feature_is_missing(
    registry: Registry, change: dict[str, object], message: str
) -> None:
    with pytest.raises(NotImplementedError, match="mla_bwd: backend 'sm90' cannot serve") as error:
        registry.select(dataclasses.replace(PROBLEM, **change), "sm90")  # type: ignore[arg-type]
    assert message in str(error.value)


def test_backend_without_implementation_says_what_is_available(registry: Registry) -> None:
    with pytest.raises(
        NotImplementedError, match=r"backend 'sm100' has no implementation .* available: cpu, sm90"
    ):
        registry.select(PROBLEM, "sm100")


def test_auto_that_finds_nothing_gives_every_reason_that_of_another_machine_last(
    registry: Registry,
) -> None:
    registry.register(Implementation("mla_bwd", "sm100", "math:exp", SM90))
    with pytest.raises(NotImplementedError) as error:
        registry.select(dataclasses.replace(PROBLEM, dtype="float64"))
    assert str(error.value).endswith(
        "sm90, sm100: dtype: takes bfloat16; got float64; cpu: device: takes cpu; got cuda"
    )


FEW = dataclasses.replace(SM90, num_heads=OneOf((16, 64)))
SINK = dataclasses.replace(SM90, attn_sink=True)
SORTING = dataclasses.replace(SM90, sorted=True)
MEND = ": move the tensors, or backend='auto'"
SINKS = "attn_sink: not together"


@pytest.mark.parametrize(
    ("features", "change", "said"),
    [
        # Each lacks it: once, with what any of them takes.
        ((SM90, SM90), {"topk": 4096}, "topk: takes 1 to 2048; got 4096"),
        ((SM90, FEW), {"num_heads": 5}, "num_heads: takes 64, 128, 16; got 5"),
        ((SM90, SORTING), {"attn_sink": True, "sorted": True}, "attn_sink: not supported"),
        # Of another machine's nothing else counts.
        ((SM90, FEW), {"device": "cpu", "num_heads": 5}, f"device: takes cuda; got cpu{MEND}"),
        # One has the one, one the other.
        ((SINK, SORTING), {"attn_sink": True, "sorted": True}, f"sorted and {SINKS}"),
        ((SINK, FEW), {"num_heads": 16, "attn_sink": True}, f"num_heads 16 and {SINKS}"),
    ],
)
def test_of_several_implementations_it_says_what_is_missing_once(
    features: tuple[Features, ...], change: dict[str, object], said: str
) -> None:
    table = Registry()
    for one in features:
        table.register(Implementation("mla_bwd", "sm90", "math:exp", one))
    with pytest.raises(NotImplementedError) as error:
        table.select(dataclasses.replace(PROBLEM, **change), "sm90")  # type: ignore[arg-type]
    assert str(error.value).partition("sm90: ")[2] == said


def test_unknown_backend_is_a_value_error(registry: Registry) -> None:
    with pytest.raises(ValueError, match=r"backend: expected one of auto, cpu, .*; got 'tpu'"):
        registry.select(PROBLEM, "tpu")
    with pytest.raises(ValueError, match=r"backend: expected one of cpu"):
        registry.register(Implementation("mla_bwd", "auto", "math:exp", SM90))


def test_auto_says_once_what_it_chose_and_why(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="flashdsa.dispatch"):
        registry.select(PROBLEM)
        registry.select(PROBLEM)
        registry.select(PROBLEM, "sm90")
    assert len(caplog.messages) == 1
    assert "mla_bwd: auto chose backend 'sm90' for cuda tensors" in caplog.text
    assert "cpu passed over (device: takes cpu; got cuda)" in caplog.text
    assert "sm90 passed over (lower priority)" in caplog.text


def test_int_sets_contain_and_print() -> None:
    assert 1 in AtLeast(1)
    assert 0 not in AtLeast(1)
    assert str(AtLeast(1)) == ">= 1"
    assert 32 in UpTo(32)
    assert 0 not in UpTo(32)
    assert 128 in OneOf((64, 128))
    assert 96 not in OneOf((64, 128))


def test_catalog_serves_every_operation_on_the_cpu_from_code_that_exists() -> None:
    for operation in catalog.operations:
        (implementation,) = [i for i in catalog.implementations(operation) if i.backend == "cpu"]
        assert callable(implementation.load())
    assert {i.backend for i in catalog.implementations()} <= set(BACKENDS)


def test_a_gpu_of_another_architecture_is_a_reason(registry: Registry) -> None:
    hopper = dataclasses.replace(SM90, capabilities=((9, 0),))
    registry.register(Implementation("topk_indices", "sm90", "math:exp", hopper))
    problem = dataclasses.replace(PROBLEM, operation="topk_indices", capability=(8, 0))
    with pytest.raises(
        NotImplementedError, match=r"'auto' cannot .* sm90: compute capability: takes 9.0; got 8.0"
    ):
        registry.select(problem)
    assert registry.select(dataclasses.replace(problem, capability=(9, 0))).backend == "sm90"


def test_auto_never_takes_an_emulator(registry: Registry) -> None:
    slow = Implementation("mla_bwd", "emulate-sm90", "math:sin", SM90, priority=9, automatic=False)
    registry.register(slow)
    assert registry.select(PROBLEM).bind == "math:log"
    assert registry.select(PROBLEM, "emulate-sm90") is slow
