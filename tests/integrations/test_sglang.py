"""SGLang's method on tensors, without SGLang; test_contracts.py reads SGLang itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashdsa.integrations import sglang
from tests.support.formulas import assert_close, attention
from tests.support.stubs import stub


def test_sglangs_sparse_prefill() -> None:
    """A topk_length of other rows is left out, as SGLang does."""
    torch.manual_seed(1)
    q, cache = torch.randn(3, 5, 576), torch.randn(20, 1, 576)
    cache[12:] = torch.nan
    table = torch.tensor([[0, 3, -1], [5, 5, 13], [-1, 2, 4]], dtype=torch.int32)
    rows = [[0, 3], [5, 5], [2, 4]]
    expected, _ = attention(q, cache[:, 0], rows, 0.1)
    lengths = torch.tensor([3, 2, 3], dtype=torch.int32)
    assert_close(sglang.forward(None, q, cache, 512, table, 0.1, lengths), expected, 1e-5)
    table[1, 2] = -1
    assert_close(sglang.forward(None, q, cache, 512, table, 0.1, lengths[:2]), expected, 1e-5)


def test_sglangs_method_is_replaced_where_its_plugins_name_flashdsa(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registered: list[Any] = []

    class Backend:
        def _forward_flashmla_sparse(
            self, q_all, kv_cache, v_head_dim, page_table_1, sm_scale, topk_length=None,
            attn_sink=None,
        ):  # fmt: skip
            """SGLang's."""

    stub(monkeypatch, "sglang.srt.layers.attention.dsa_backend", DeepseekSparseAttnBackend=Backend)
    stub(
        monkeypatch,
        "sglang.srt.plugins.hook_registry",
        HookRegistry=SimpleNamespace(register=lambda *arguments: registered.append(arguments)),
        HookType=SimpleNamespace(REPLACE="replace"),
    )
    for named, expected in (("", 0), ("other", 0), ("other, flashdsa", 1)):
        monkeypatch.setenv("SGLANG_PLUGINS", named)
        sglang.register()
        assert len(registered) == expected
    assert registered == [(sglang.TARGET, sglang.forward, "replace")]
    with pytest.raises(NotImplementedError, match="_forward_flashmla_sparse"):
        sglang.require_known(("self", "q"))
