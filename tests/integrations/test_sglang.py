"""SGLang's hooks on tensors, without SGLang: attention, the indexer, what ends a start.

What the replaced methods look like in SGLang itself is in test_contracts.py.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa.integrations import sglang
from flashdsa.integrations.sglang import indexer
from flashdsa.row_formats import ROW_FORMATS
from tests.support.formulas import assert_close, attention
from tests.support.stubs import stub
from tests.support.vllm_batches import gather_index_keys, require_best

HEADS, TOPK, PAGES = 4, 40, 8
TABLE = torch.tensor([[5, 2], [1, 7]], dtype=torch.int32)


def test_attention_on_bf16_rows() -> None:
    """A topk_length of other rows is left out, as SGLang does; 0.5.13 gives none."""
    torch.manual_seed(1)
    q, cache = torch.randn(3, 5, 576), torch.randn(20, 1, 576)
    cache[12:] = torch.nan
    table = torch.tensor([[0, 3, -1], [5, 5, 13], [-1, 2, 4]], dtype=torch.int32)
    rows = [[0, 3], [5, 5], [2, 4]]
    expected, _ = attention(q, cache[:, 0], rows, 0.1)
    lengths = torch.tensor([3, 2, 3], dtype=torch.int32)
    assert_close(sglang.forward(None, q, cache, 512, table, 0.1, lengths), expected, 1e-5)
    described = SimpleNamespace(dsa_cache_seqlens_int32=lengths)
    got = sglang.forward_packed(None, q, cache, 512, 0.1, None, described, table)
    assert got.shape == (3, 1, 5, 512)
    assert_close(got[:, 0], expected, 1e-5)
    table[1, 2] = -1
    assert_close(sglang.forward(None, q, cache, 512, table, 0.1, lengths[:2]), expected, 1e-5)
    assert_close(sglang.forward(None, q, cache, 512, table, 0.1), expected, 1e-5)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("name", "row_bytes"), [("v32", 656), ("v32_no_rope", 528)])
def test_attention_on_packed_rows(dtype: torch.dtype, name: str, row_bytes: int) -> None:
    """Rows as SGLang's fp8 cache has them, in 0.5.23 also without RoPE, by both methods."""
    torch.manual_seed(2)
    columns = ROW_FORMATS[name].d_qk
    q = torch.randn(3, 5, columns).bfloat16()
    packed = flashdsa.quantize_kv(torch.randn(20, columns).bfloat16(), kv_format=name)
    assert packed.shape == (20, row_bytes)
    cache = packed.view(dtype).unsqueeze(1)
    table = torch.tensor([[0, 3, -1], [5, 6, -1], [19, 2, 4]], dtype=torch.int32)
    rows = [[0, 3], [5, 6], [19, 2, 4]]
    expected, _ = attention(
        q.float(),
        flashdsa.read_kv_cache(packed, torch.arange(20), kv_format=name).float(),
        rows,
        0.1,
    )
    described = SimpleNamespace(dsa_cache_seqlens_int32=torch.tensor([2, 2, 3], dtype=torch.int32))
    got = sglang.forward_packed(None, q, cache, 512, 0.1, None, described, table)
    assert_close(got[:, 0].float(), expected, 1e-2)
    again = sglang.forward(None, q, cache, 512, table, 0.1)
    assert_close(again.float(), expected, 1e-2)


class Pool:
    """SGLang's cache of index keys: 64 rows of 132 bytes a page."""

    def __init__(self) -> None:
        self.cache = torch.zeros(PAGES, 64, 132, dtype=torch.uint8)
        flashdsa.write_index_k_cache(
            torch.randn(PAGES * 64, 128).bfloat16(),
            torch.arange(PAGES * 64),
            self.cache.unsqueeze(2),
        )

    def get_index_k_with_scale_buffer(self, layer_id: int) -> Tensor:
        """Pages as SGLang has them."""
        assert layer_id == 3
        return self.cache.view(PAGES, 64 * 132)

    def get_index_k_scale_buffer(
        self, layer_id: int, seq_len: Tensor, tables: Tensor, total: int, longest: int
    ) -> tuple[Tensor, Tensor]:
        """Keys and scales of all requests as bytes, one after another."""
        assert layer_id == 3 and (total, longest) == (int(seq_len.sum()), int(seq_len.max()))
        keys = torch.zeros(total, 128).to(torch.float8_e4m3fn)
        scales = torch.zeros(total, 4, dtype=torch.uint8)
        ends = torch.cat((torch.zeros(1, dtype=torch.int64), seq_len.cumsum(0)))
        gather_index_keys(self.cache, keys, scales, tables, ends)
        return keys.view(torch.uint8), scales


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    torch.manual_seed(3)
    held = Pool()
    stub(
        monkeypatch, "sglang.srt.model_executor.forward_context", get_token_to_kv_pool=lambda: held
    )
    fused = SimpleNamespace(SGLANG_DSA_FUSE_TOPK=SimpleNamespace(get=lambda: True))
    stub(monkeypatch, "sglang.srt.environ", envs=fused)
    return held


def queries(count: int) -> tuple[Tensor, Tensor]:
    """Quantised queries, and weights as SGLang has them: (T, H, 1)."""
    fp8, weights = flashdsa.quantize_index_q(
        torch.randn(count, HEADS, 128).bfloat16(), torch.rand(count, HEADS)
    )
    return fp8, weights.unsqueeze(2)


def slots_of(positions: Tensor, requests: list[int]) -> Tensor:
    """The slots of positions, -1 where there is none."""
    tables = TABLE[requests].long()
    pages = tables.gather(1, positions.clamp(min=0).long() // 64)
    return torch.where(positions < 0, -1, pages * 64 + positions % 64).int()


def never(*_: Any) -> Tensor:
    """SGLang's method, where flashdsa serves."""
    raise AssertionError("not to be called")


LAYER = SimpleNamespace(index_topk=TOPK)


@pytest.mark.parametrize("next_n", [0, 2])
def test_decodes_and_verifications(pool: Pool, next_n: int) -> None:
    """A row a query, -1 for padding; verifications count their drafts in lengths of their own."""
    requests = [0, 1] if not next_n else [0, 0, 1, 1]
    seen = [90, 30] if not next_n else [89, 90, 29, 30]
    count = len(seen)
    described: Any = SimpleNamespace(
        force_unfused_topk=True,
        get_seqlens_int32=lambda: torch.tensor([90, 30], dtype=torch.int32),
        get_seqlens_expanded=lambda: torch.tensor(seen, dtype=torch.int32),
        get_dsa_extend_len_cpu=lambda: [count // 2] * 2,
        get_page_table_64=lambda: TABLE[requests],
    )
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_decode_or_idle=lambda: not next_n))
    q, weights = queries(count + 3)
    given = batch, 3, q, weights, described
    positions = indexer.choose_paged(never, LAYER, *given)
    assert positions.shape == (count + 3, TOPK) and positions.dtype == torch.int32
    assert (positions[count:] == -1).all()
    found = positions[:count], seen, TABLE[requests], pool.cache, q, weights.squeeze(2)
    require_best(*found[:4], *(one[:count] for one in found[4:]))
    described.force_unfused_topk = False
    slots = indexer.choose_paged(never, LAYER, *given)
    wanted = slots_of(positions[:count], requests)
    assert torch.equal(slots[:count].sort().values, wanted.sort().values)


def prompts(method: str) -> tuple[list[int], list[int], Any]:
    """Five queries of two requests with 90 and 30 keys: their requests, keys and description."""
    requests, seen = [0, 0, 0, 1, 1], [88, 89, 90, 29, 30]
    starts = torch.tensor([0, 0, 0, 90, 90], dtype=torch.int32)
    lengths = torch.tensor([90, 30])
    return requests, seen, SimpleNamespace(
        force_unfused_topk=False,
        topk_transform_method=SimpleNamespace(name=method),
        attn_metadata=SimpleNamespace(topk_indices_offset=starts),
        get_indexer_kvcache_range=lambda: (starts, starts + torch.tensor(seen, dtype=torch.int32)),
        get_indexer_seq_len=lambda: lengths,
        get_indexer_seq_len_cpu=lambda: lengths,
        get_token_to_batch_idx=lambda: torch.tensor(requests, dtype=torch.int32),
        get_page_table_64=lambda: TABLE,
    )  # fmt: skip


def test_prompts(pool: Pool) -> None:
    """Positions, slots of the cache, or rows of what SGLang gathers; -1 for padding."""
    requests, seen, described = prompts("PAGED")
    described.force_unfused_topk = True
    q, weights = queries(7)
    given = False, None, 3, q, weights, described
    positions = indexer.choose_ragged(never, LAYER, *given)
    assert positions.shape == (7, TOPK) and (positions[5:] == -1).all()
    require_best(positions[:5], seen, TABLE[requests], pool.cache, q[:5], weights.squeeze(2)[:5])
    described.force_unfused_topk = False
    buffer = torch.full((7, TOPK), -1, dtype=torch.int32)
    slots = indexer.choose_ragged(never, LAYER, *given, buffer)
    assert slots is buffer
    assert torch.equal(slots[:5], slots_of(positions[:5], requests))
    described.topk_transform_method.name = "RAGGED"
    rows = indexer.choose_ragged(never, LAYER, *given)
    first = described.attn_metadata.topk_indices_offset[:, None]
    assert torch.equal(rows[:5], torch.where(positions[:5] < 0, -1, positions[:5] + first))
    assert (slots[5:] == -1).all() and (rows[5:] == -1).all()


def test_what_is_left_to_sglang(pool: Pool) -> None:
    """Layers that keep first or last tokens, and batches without a request."""
    _, _, described = prompts("PAGED")
    keeps = SimpleNamespace(index_topk=TOPK, num_init_tokens=0, num_local_tokens=4)
    told: list[Any] = []
    answer, buffer = torch.zeros(1), torch.zeros(2)

    def theirs(*given: Any) -> Tensor:
        told.append(given)
        return answer

    q, weights = queries(1)
    given = None, 3, q, weights, described
    assert indexer.choose_paged(theirs, keeps, *given) is answer
    assert indexer.choose_ragged(theirs, keeps, True, *given) is answer
    described.get_page_table_64 = lambda: TABLE[:0]
    assert indexer.choose_ragged(theirs, LAYER, True, *given, buffer) is answer
    wanted = (keeps, *given), (keeps, True, *given, None), (LAYER, True, *given, buffer)
    for got, expected in zip(told, wanted, strict=True):
        assert all(one is other for one, other in zip(got, expected, strict=True))


OLDER = SimpleNamespace(
    _forward_flashmla_sparse=lambda self, q_all, kv_cache, v_head_dim, page_table_1, sm_scale: None,
    _forward_flashmla_kv=lambda self, q_all, kv_cache, v_head_dim, sm_scale, layer, metadata,
    page_table_1: None,
)  # fmt: skip
"""SGLang 0.5.13's class: without the lists' lengths and a sink."""
NEWER = SimpleNamespace(
    _forward_flashmla_sparse=lambda self, q_all, kv_cache, v_head_dim, page_table_1, sm_scale,
    topk_length=None, attn_sink=None: None,
    _forward_flashmla_kv=OLDER._forward_flashmla_kv,
)  # fmt: skip
"""0.5.23's."""
UNKNOWN = SimpleNamespace(
    _forward_flashmla_sparse=OLDER._forward_flashmla_sparse,
    _forward_flashmla_kv=lambda self, q_all, tensors: None,
)
INDEXER = SimpleNamespace(
    _get_topk_paged=lambda self, forward_batch, layer_id, q_fp8, weights, metadata: None,
    _get_topk_ragged=lambda self, enable_dual_stream, forward_batch, layer_id, q_fp8, weights,
    metadata, topk_result=None: None,
)  # fmt: skip


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is registered with SGLang's hooks."""
    found: list[Any] = []
    stub(
        monkeypatch,
        "sglang.srt.plugins.hook_registry",
        HookRegistry=SimpleNamespace(register=lambda *arguments: found.append(arguments)),
        HookType=SimpleNamespace(REPLACE="replace", AROUND="around", AFTER="after"),
    )
    stub(monkeypatch, sglang.INDEXER.rpartition(".")[0], Indexer=INDEXER)
    return found


@pytest.mark.parametrize("kind", [OLDER, NEWER], ids=["0.5.13", "0.5.23"])
def test_plugins_that_are_named_replace_methods(
    monkeypatch: pytest.MonkeyPatch, registered: list[Any], kind: Any
) -> None:
    stub(monkeypatch, sglang.BACKEND.rpartition(".")[0], DeepseekSparseAttnBackend=kind)
    attention_hooks = [
        (f"{sglang.BACKEND}._forward_flashmla_sparse", sglang.forward, "replace"),
        (f"{sglang.BACKEND}._forward_flashmla_kv", sglang.forward_packed, "replace"),
        (sglang.CHECK, sglang.require_served, "after"),
        (f"{sglang.BACKEND}.__init__", sglang.prepare, "after"),
    ]
    indexer_hooks = [
        (f"{sglang.INDEXER}._get_topk_paged", indexer.choose_paged, "around"),
        (f"{sglang.INDEXER}._get_topk_ragged", indexer.choose_ragged, "around"),
        (f"{sglang.INDEXER}.__init__", indexer.prepare_index, "after"),
    ]
    for named, expected in (
        ("", []),
        ("other", []),
        ("other, flashdsa", attention_hooks),
        ("flashdsa_indexer", indexer_hooks),
        ("flashdsa,flashdsa_indexer", attention_hooks + indexer_hooks),
    ):
        registered.clear()
        monkeypatch.setenv("SGLANG_PLUGINS", named)
        sglang.register()
        sglang.register_indexer()
        assert registered == expected


HOOKS: dict[str, dict[str, Any] | None] = {
    "no module": None,
    "no registry": {},
    "other kinds": {
        "HookRegistry": SimpleNamespace(register=lambda *_: None), "HookType": SimpleNamespace(),
    },
    "another call": {
        "HookRegistry": SimpleNamespace(register=lambda path: None),
        "HookType": SimpleNamespace(REPLACE=0, AROUND=1, AFTER=2),
    },
}  # fmt: skip
"""Registries of hooks of older and newer releases."""


@pytest.mark.parametrize("hooks", HOOKS)
def test_other_hooks_end_only_a_start_that_asks_for_them(
    monkeypatch: pytest.MonkeyPatch, registered: list[Any], hooks: str
) -> None:
    stub(monkeypatch, sglang.BACKEND.rpartition(".")[0], DeepseekSparseAttnBackend=NEWER)
    module, members = "sglang.srt.plugins.hook_registry", HOOKS[hooks]
    monkeypatch.delitem(sys.modules, module)
    if members is None:
        monkeypatch.setitem(sys.modules, module, None)
    else:
        stub(monkeypatch, module, **members)
    monkeypatch.setenv("SGLANG_PLUGINS", "")
    sglang.register()
    sglang.register_indexer()
    monkeypatch.setenv("SGLANG_PLUGINS", "flashdsa, flashdsa_indexer")
    for register in (sglang.register, sglang.register_indexer):
        with pytest.raises(SystemExit, match=r"SGLang is not known: \w+: .* \(flashdsa .*sglang "):
            register()


def test_another_sglang_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, registered: list[Any]
) -> None:
    """One line, by an exception that SGLang's loader does not catch; nothing is replaced."""
    monkeypatch.setenv("SGLANG_PLUGINS", "flashdsa")
    module = sglang.BACKEND.rpartition(".")[0]
    stub(monkeypatch, module, DeepseekSparseAttnBackend=UNKNOWN)
    with pytest.raises(SystemExit, match=r"not known: _forward_flashmla_kv\(self, q_all, tensors"):
        sglang.register()
    monkeypatch.delattr(sys.modules[module], "DeepseekSparseAttnBackend")
    with pytest.raises(
        SystemExit, match=r"flashdsa: this SGLang is not known: .*SparseAttnBackend"
    ):
        sglang.register()
    assert not registered


@pytest.mark.parametrize("version", ["0.5.13", "0.5.23"])
def test_other_backends_end_the_start(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """A model without sparse attention has none; 0.5.23 keeps what it chose beside the fields."""
    args = SimpleNamespace(dsa_prefill_backend=None, dsa_decode_backend=None)
    chosen = args
    if version == "0.5.23":
        chosen = SimpleNamespace(dsa_prefill_backend=None, dsa_decode_backend=None)
        stub(
            monkeypatch, "sglang.srt.arg_groups.overrides",
            resolution_result=lambda given, name: getattr(chosen, name) if given is args else "",
        )  # fmt: skip
    sglang.require_served(None, args)
    chosen.dsa_prefill_backend, chosen.dsa_decode_backend = "flashmla_sparse", "flashmla_kv"
    sglang.require_served(None, args)
    chosen.dsa_decode_backend = "fa3"
    with pytest.raises(SystemExit, match="--dsa-decode-backend fa3 is not served; expected flash"):
        sglang.require_served(None, args)
