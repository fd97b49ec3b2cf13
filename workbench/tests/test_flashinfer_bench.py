"""FlashInfer-Bench's solutions: their form, and what their `run` writes.

Their form by that package's own rules is in test_contracts.py.
"""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

import flashdsa
from tests.support.formulas import assert_close, attention
from workbench.__main__ import cli
from workbench.flashinfer_bench import ATTENTION, ATTENTION_PS1, INDEXER, solution


def run_of(definition: str) -> Any:
    """The solution's function, from its source."""
    (source,) = solution(definition)["sources"]
    names: dict[str, Any] = {}
    exec(compile(source["content"], source["path"], "exec"), names)
    return names["run"]


@pytest.mark.parametrize(
    ("definition", "parameters"),
    [
        (INDEXER, "q_index_fp8 k_index_cache_fp8 weights seq_lens block_table topk_indices"),
        (ATTENTION, "q_nope q_pe ckv_cache kpe_cache sparse_indices sm_scale output lse"),
    ],
)
def test_inputs_and_then_outputs_are_positional(definition: str, parameters: str) -> None:
    assert list(inspect.signature(run_of(definition)).parameters) == parameters.split()


def test_the_command_writes_a_file_a_definition(tmp_path: Path) -> None:
    arguments = [
        "export",
        "flashinfer-bench",
        "--output",
        str(tmp_path),
        "--author",
        "me",
        "--json",
    ]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    written = [json.loads(Path(path).read_text()) for path in json.loads(done.stdout)["solutions"]]
    assert [one["definition"] for one in written] == [INDEXER, ATTENTION, ATTENTION_PS1]
    for one in written:
        file, _, function = one["spec"]["entry_point"].partition("::")
        assert one["author"] == "me" and one["spec"]["target_hardware"]
        assert [source["path"] for source in one["sources"]] == [file]
        assert f"def {function}(" in one["sources"][0]["content"]


@pytest.mark.parametrize(("definition", "page_size"), [(ATTENTION, 64), (ATTENTION_PS1, 1)])
def test_attention_into_uninitialised_outputs(definition: str, page_size: int) -> None:
    """Rows that no valid slot names are NaN; the last query has no valid slot."""
    torch.manual_seed(0)
    ckv = torch.randn(128 // page_size, page_size, 512).bfloat16()
    kpe = torch.randn(128 // page_size, page_size, 64).bfloat16()
    ckv.view(128, 512)[50:], kpe.view(128, 64)[50:] = torch.nan, torch.nan
    q_nope, q_pe = torch.randn(3, 16, 512).bfloat16(), torch.randn(3, 16, 64).bfloat16()
    indices = torch.randint(0, 50, (3, 2048), dtype=torch.int32)
    indices[0, 100:], indices[2] = -1, -1
    output = torch.full((3, 16, 512), torch.nan, dtype=torch.bfloat16)
    lse = torch.full((3, 16), torch.nan)
    run_of(definition)(q_nope, q_pe, ckv, kpe, indices, 0.05, output, lse)
    q, kv = torch.cat([q_nope, q_pe], -1), torch.cat([ckv, kpe], -1).view(128, 576)
    rows = [[i for i in row if i >= 0] for row in indices.tolist()]
    expected, expected_lse = attention(q, kv, rows, 0.05)
    expected_lse[2] = -torch.inf
    assert_close(output, expected, 4e-3)
    assert_close(lse, expected_lse / math.log(2), 1e-5)


def test_the_indexer_is_the_librarys() -> None:
    torch.manual_seed(0)
    cache = torch.zeros(40, 64, 1, 132, dtype=torch.int8)
    flashdsa.write_index_k_cache(torch.randn(2560, 128), torch.arange(2560), cache)
    q = torch.randn(2, 64, 128).to(torch.float8_e4m3fn)
    operands: tuple[Tensor, ...] = (
        q,
        cache,
        torch.randn(2, 64),
        torch.tensor([2300, 64], dtype=torch.int32),
        torch.arange(40, dtype=torch.int32).repeat(2, 1),
    )
    got, expected = (torch.full((2, 2048), 9, dtype=torch.int32) for _ in range(2))
    run_of(INDEXER)(*operands, got)
    flashdsa.dsa_topk_indexer(*operands, expected)
    assert torch.equal(got, expected)
