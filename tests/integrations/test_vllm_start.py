"""What vLLM's backends do before requests come, without vLLM: kernels, memory, lines of the log."""

from __future__ import annotations

import logging
import sys
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import flashdsa
from flashdsa.errors import UnsupportedError
from flashdsa.integrations import start, vllm
from flashdsa.settings import VLLM_V4
from tests.integrations.test_vllm import batch_of, operands, run, serve
from tests.support.stubs import stub, taking
from tests.support.vllm_stand_ins import (
    ATTENTION,
    HEADS,
    MOST_TOKENS,
    PARAMETERS,
    TOPK,
    Indexer,
    layer_of,
)

BOTH = pytest.mark.parametrize("name", ["FlashDsaMLASparseImpl", "FlashDsaMLASparseIndexerImpl"])


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    """Lines of the log that vLLM shows: those of its own hierarchy, from INFO on."""
    caplog.set_level(logging.INFO, logger="vllm")
    return lambda: [one for one in caplog.records if one.name.split(".")[0] == "vllm"]


@BOTH
@pytest.mark.parametrize("cache", ["auto", "fp8_ds_mla"])
def test_kernels_are_loaded_for_the_servers_sizes(
    made: Any, monkeypatch: pytest.MonkeyPatch, name: str, cache: str
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(start, "warm_up", lambda name, **sizes: calls.append((name, sizes)))
    layer_of(getattr(made.backend, name), cache, indexer=Indexer())
    found = [sizes for operation, sizes in calls if operation == "sparse_mla_fwd"]
    packed = cache == "fp8_ds_mla"
    assert [one.get("kv_dtype") for one in found] == ([torch.uint8, None] if packed else [None])
    assert [one.get("topk_length") for one in found] == ([True, None] if packed else [True])
    for one in found:
        assert {1, MOST_TOKENS // 2, MOST_TOKENS} <= set(one["S"]) and max(one["S"]) == MOST_TOKENS
        assert one["H"] == 4 and one["topk"] == TOPK
    chosen = {operation for operation, _ in calls} - {"sparse_mla_fwd"}
    assert chosen == ({"dsa_topk_indexer", "dsa_topk_prefill"} if "Indexer" in name else set())


@BOTH
def test_a_server_without_kernels_does_not_start(
    made: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def missing(operation: str, **sizes: Any) -> None:
        raise UnsupportedError("compiling kernels needs CuTe DSL")

    monkeypatch.setattr(start, "warm_up", missing)
    with pytest.raises(NotImplementedError, match="needs CuTe DSL"):
        layer_of(getattr(made.backend, name))


def test_ranks_of_decode_context_parallelism_have_all_their_heads(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM gathers q of all ranks, in memory of its own."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(start, "warm_up", lambda name, **sizes: calls.append(sizes))
    kind = made.backend.FlashDsaMLASparseImpl
    monkeypatch.setattr(kind.__mro__[1], "dcp_world_size", 2)
    layer_of(kind)
    assert [one["H"] for one in calls] == [8] and len(made.workspace.held) == 0


@pytest.mark.parametrize(("cache", "columns"), [("auto", 576), ("auto", 512), ("fp8_ds_mla", 576)])
def test_memory_is_reserved_before_vllm_measures_it(
    made: Any, monkeypatch: pytest.MonkeyPatch, cache: str, columns: int
) -> None:
    """q of a whole step and, of a packed cache, rows of the longest prompt."""
    monkeypatch.setattr(made.backend, "ROWS_AT_ONCE", 100)
    layer_of(made.backend.FlashDsaMLASparseImpl, cache, columns)
    rows = 512 * 576 * 2 if cache == "fp8_ds_mla" else 0
    assert len(made.workspace.held) == MOST_TOKENS * 4 * columns * 2 + rows


@BOTH
def test_one_line_says_what_serves(made: Any, lines: Any, name: str) -> None:
    for _ in range(2):
        for index in (Indexer(), None):
            layer_of(getattr(made.backend, name), indexer=index)
    (line,) = lines()
    choice = ", dsa_topk_indexer by cpu, dsa_topk_prefill by cpu"
    mine, left = (
        (choice, "verifications of unequal lengths") if "Indexer" in name else ("", "the indexer")
    )
    assert line.levelno == logging.INFO and line.message.split(": ", 1)[1] == (
        f"sparse_mla_fwd by cpu{mine}; kernels: none loaded yet; kv cache auto; "
        f"vLLM's: {left}, RoPE, writes to the caches, dense short prompts"
    )


@pytest.mark.parametrize(
    ("version", "warns"),
    [
        ("0.33.0", False),
        ("0.33.4+cu130", False),
        ("0.32.1", True),
        ("0.330.0", True),
        ("dev", True),
    ],
)
def test_another_vllm_is_one_warning(
    made: Any, monkeypatch: pytest.MonkeyPatch, lines: Any, version: str, warns: bool
) -> None:
    stub(monkeypatch, "vllm", __version__=version)
    for _ in range(2):
        layer_of(made.backend.FlashDsaMLASparseImpl)
    page = Path(__file__).parents[2] / "docs/guides/serving.md"
    assert f"[vLLM {vllm.KNOWN}](#vllm), lowest and highest" in page.read_text()
    said = [one.message for one in lines() if one.levelno == logging.WARNING]
    assert said == [f"flashdsa was tried with vLLM 0.33; {version} is installed"] * warns


def test_an_index_without_own_kernels_is_refused(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepGEMM lacks these heads, too: vLLM's indexer would end the engine at the first request."""
    asked: list[Any] = []

    def refuse(calls: Any, who: str) -> None:
        asked.append((calls, who))
        raise UnsupportedError("no kernels")

    monkeypatch.setattr(start, "load_own", refuse)
    with pytest.raises(NotImplementedError, match="no kernels"):
        serve(made)
    sizes = {"H": HEADS, "topk": TOPK}
    calls = {"dsa_topk_indexer": {"positions": True, **sizes}, "dsa_topk_prefill": sizes}
    assert asked == [(calls, "FLASHDSA_MLA_SPARSE_INDEXER")]
    assert sys.modules[ATTENTION].sparse_attn_indexer is made.theirs  # type: ignore[attr-defined]


def test_scales_of_capability_10_are_refused(made: Any) -> None:
    """A key's scale is four UE8M0 bytes there, in pages of the same 132 bytes: as fp32 it would be
    about its square."""
    made.mx_scales = True
    with pytest.raises(
        NotImplementedError, match=r"as four UE8M0 bytes; use FLASHDSA_MLA_SPARSE$"
    ) as raised:
        serve(made)
    assert "\n" not in str(raised.value)
    assert sys.modules[ATTENTION].sparse_attn_indexer is made.theirs  # type: ignore[attr-defined]
    layer_of(made.backend.FlashDsaMLASparseImpl, indexer=Indexer())


# The function that is replaced


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("weights", "weights_of_heads"),
        ("topk_indices_buffer ", "topk_indices_buffer one_more "),
        ("k_cache_prefix kv_cache", "kv_cache k_cache_prefix"),
        ("dense_mha_metadata_layer_name", "dense_layer"),
        ("candidate_blocks=None", ""),
    ],
)
def test_a_vllm_whose_function_has_other_parameters_is_refused(
    made: Any, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    other = taking(PARAMETERS.replace(old, new, 1))
    stub(monkeypatch, "vllm", __version__="0.34.0")
    stub(monkeypatch, ATTENTION, sparse_attn_indexer=other)
    with pytest.raises(
        NotImplementedError, match=r"of vLLM 0\.34\.0 is not known: .* of vLLM 0\.33"
    ):
        serve(made)
    assert sys.modules[ATTENTION].sparse_attn_indexer is other  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "others",
    [
        {"use_fp4_cache": True},
        {"candidate_blocks": torch.zeros(3, dtype=torch.int32)},
        {"candidate_write": True},
        {"skip_k_cache_insert": False},
        {"skip_topk_buffer_clear": False},
        {"use_pcp": True},
        {"dcp_world_size": 2},
        {"of_a_later_version": None},
    ],
    ids=lambda one: next(iter(one)),
)
def test_calls_that_mean_something_else_are_left_to_vllm(made: Any, others: Any) -> None:
    serve(made)
    described, seen, _ = batch_of(1, True)
    inputs = operands(len(seen))
    assert run(made, described, *inputs, **others)[0] == "vLLM's"
    assert len(made.left) == 1


def test_arguments_that_are_missing_have_vllms_defaults(made: Any) -> None:
    """vLLM clears the buffer unless it is told not to; more arguments without a name may come."""
    serve(made)
    called = sys.modules[ATTENTION].sparse_attn_indexer  # type: ignore[attr-defined]
    assert isinstance(called, partial)
    named = {
        "skip_k_cache_insert": True, "use_pcp": False, "dense_mha_metadata_layer_name": "layer",
    }  # fmt: skip
    assert called(*range(14), **named) == "vLLM's"
    assert called(*range(15), **named) == "vLLM's"


def test_another_engine_of_the_process_keeps_its_own_indexer(made: Any) -> None:
    """A second LLM with vLLM's backend has layers of the same names, and caches of its own."""
    serve(made)
    described, seen, _ = batch_of(1, True)
    inputs = operands(len(seen))
    assert run(made, described, *inputs)[0] != "vLLM's"
    made.layers["layer.k_cache"] = Indexer().k_cache
    assert run(made, described, *inputs)[0] == "vLLM's"
    made.layers.clear()
    assert run(made, described, *inputs)[0] == "vLLM's"


REGISTRY = "vllm.v1.attention.backends.registry"


class Full(Enum):
    """vLLM's backends, of a release in which nothing can be added."""

    THEIRS = "theirs"


def refuse(name: str, path: str) -> None:
    raise ValueError(f"{name} is no backend")


REGISTRIES: dict[str, dict[str, Any] | None] = {
    "no module": None,
    "an empty module": {},
    "no function": {"AttentionBackendEnum": Full},
    "a table": {"AttentionBackendEnum": {}, "register_backend": lambda name, path: None},
    "another function": {"AttentionBackendEnum": Full, "register_backend": lambda one: None},
    "a refusal": {"AttentionBackendEnum": Full, "register_backend": refuse},
    "names not kept": {"AttentionBackendEnum": Full, "register_backend": lambda name, path: None},
}
"""Registries of older and newer releases; none takes our names."""


@pytest.mark.parametrize("registry", REGISTRIES)
def test_a_vllm_without_our_names_starts_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, lines: Any, registry: str
) -> None:
    start.say.cache_clear()
    stub(monkeypatch, "vllm", __version__="0.12.0")
    members = REGISTRIES[registry]
    if members is None:
        monkeypatch.setitem(sys.modules, REGISTRY, None)
    else:
        stub(monkeypatch, REGISTRY, **members)
    for _ in range(2):
        vllm.register()
    (line,) = lines()
    said = f"flashdsa {flashdsa.__version__} has no backend for vLLM 0.12.0; 0.33 is known: "
    assert line.levelno == logging.WARNING and line.message.startswith(said)


def test_what_the_switch_asks_for_may_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch, "vllm", __version__="0.12.0")
    monkeypatch.setenv(VLLM_V4, "1")
    with pytest.raises(ImportError, match="vllm"):
        vllm.register()
