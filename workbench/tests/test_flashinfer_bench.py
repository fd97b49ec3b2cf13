"""FlashInfer-Bench's solutions: their form, and what their `run` writes.

Their form by that package's own rules is in test_contracts.py.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

import flashdsa
from tests.backends.test_bound_calls import Pretended
from tests.support.formulas import assert_close, attention
from workbench.__main__ import cli
from workbench.flashinfer_bench import ATTENTION, ATTENTION_PS1, INDEXER, SOURCES, solution
from workbench.flashinfer_bench.attention import attend
from workbench.flashinfer_bench.binding import compile_kernel, dsa_topk_indexer_launch


def parameters_of_run(definition: str) -> list[str]:
    """Names of what the solution's function takes, from its source."""
    tree = ast.parse(SOURCES[definition])
    (run,) = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    assert run.name == "run"
    return [one.arg for one in run.args.args]


@pytest.mark.parametrize(
    ("definition", "function"), [(INDEXER, dsa_topk_indexer_launch), (ATTENTION, attend)]
)
def test_inputs_and_then_outputs_are_positional(definition: str, function: Any) -> None:
    known = {
        INDEXER: "q_index_fp8 k_index_cache_fp8 weights seq_lens block_table topk_indices",
        ATTENTION: "q_nope q_pe ckv_cache kpe_cache sparse_indices sm_scale output lse",
    }
    taken = inspect.signature(function).parameters.values()
    positional = [one.name for one in taken if one.kind is not one.KEYWORD_ONLY]
    assert parameters_of_run(definition) == positional == known[definition].split()


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
        assert one["sources"][0]["path"] == file and all(x["content"] for x in one["sources"])
        assert f"def {function}(" in one["sources"][0]["content"]
        assert "NVIDIA B200" in one["spec"]["target_hardware"]


def attention_inputs(page_size: int, topk: int) -> list[Any]:
    """Inputs of a definition, and poisoned outputs. Rows that no valid slot names are NaN; the last
    query has no valid slot."""
    torch.manual_seed(0)
    ckv = torch.randn(128 // page_size, page_size, 512).bfloat16()
    kpe = torch.randn(128 // page_size, page_size, 64).bfloat16()
    ckv.view(128, 512)[50:], kpe.view(128, 64)[50:] = torch.nan, torch.nan
    q_nope, q_pe = torch.randn(3, 16, 512).bfloat16(), torch.randn(3, 16, 64).bfloat16()
    indices = torch.randint(0, 50, (3, topk), dtype=torch.int32)
    indices[0, topk // 2 :], indices[1, 3], indices[2] = -1, 128, -1
    output = torch.full((3, 16, 512), torch.nan, dtype=torch.bfloat16)
    return [q_nope, q_pe, ckv, kpe, indices, 0.05, output, torch.full((3, 16), torch.nan)]


def assert_right(given: list[Any]) -> None:
    """The outputs are those of the inputs."""
    q_nope, q_pe, ckv, kpe, indices, scale, output, lse = given
    q, kv = torch.cat([q_nope, q_pe], -1), torch.cat([ckv, kpe], -1).view(128, 576)
    rows = [[i for i in row if 0 <= i < 128] for row in indices.tolist()]
    expected, expected_lse = attention(q, kv, rows, scale)
    expected_lse[2] = -torch.inf
    assert_close(output, expected, 4e-3)
    assert_close(lse, expected_lse / math.log(2), 1e-5)


@pytest.mark.parametrize("page_size", [64, 1])
def test_attention_into_uninitialised_outputs(page_size: int) -> None:
    given = attention_inputs(page_size, 2048)
    attend(*given)
    assert_right(given)


def test_blackwell_reads_both_caches_in_place() -> None:
    """The kernel's operands are the caches' memory; tests/kernels/attention has its results."""
    given, runner = attention_inputs(64, 40), Pretended()
    attend(*given, runner=runner)  # type: ignore[arg-type]
    ((plan, arguments),) = runner.launched
    assert plan.kv_apart
    taken = {one.data_ptr() for one in arguments if isinstance(one, Tensor)}
    assert taken >= {given[2].data_ptr(), given[3].data_ptr()}


@pytest.mark.slow
def test_blackwell_s_results_are_right() -> None:
    """Emulated; nothing is found."""
    pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")
    from flashdsa.backends.emulated.runner import Emulator

    given, emulator = attention_inputs(64, 40), Emulator(on_finding="collect")
    attend(*given, runner=emulator)
    assert [str(finding) for finding in emulator.findings] == []
    assert_right(given)


def indexer_inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    cache = torch.zeros(40, 64, 1, 132, dtype=torch.int8)
    flashdsa.write_index_k_cache(torch.randn(2560, 128), torch.arange(2560), cache)
    return (
        torch.randn(2, 64, 128).to(torch.float8_e4m3fn),
        cache,
        torch.randn(2, 64),
        torch.tensor([2300, 64], dtype=torch.int32),
        torch.arange(40, dtype=torch.int32).repeat(2, 1),
    )


def test_the_binding_forwards_and_warms_up() -> None:
    """It does nothing but hand its arguments on: the same tensors, the same errors."""
    compile_kernel()
    operands = indexer_inputs()
    got, expected = (torch.full((2, 2048), 9, dtype=torch.int32) for _ in range(2))
    assert dsa_topk_indexer_launch(*operands, got) is None  # type: ignore[func-returns-value]
    flashdsa.dsa_topk_indexer(*operands, expected)
    assert torch.equal(got, expected)
    with pytest.raises(ValueError, match="weights: expected"):
        dsa_topk_indexer_launch(operands[0], operands[1], operands[2][:1], *operands[3:], got)


def test_solutions_run_without_flashdsa(tmp_path: Path) -> None:
    """In a process that has the solutions' files only, one after the other."""
    given = {INDEXER: [*indexer_inputs(), torch.full((2, 2048), 9, dtype=torch.int32)]}
    given[ATTENTION] = attention_inputs(64, 2048)
    torch.save(given, tmp_path / "given.pt")
    for definition in given:
        for source in solution(definition)["sources"]:
            path = tmp_path / definition / source["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source["content"])
    program = (
        "import runpy, sys, torch\n"
        "given = torch.load('given.pt')\n"
        "for name, arguments in given.items():\n"
        "    runpy.run_path(f'{name}/main.py')['run'](*arguments)\n"
        "import flashdsa\n"
        "assert flashdsa.__file__.startswith(sys.argv[1]), flashdsa.__file__\n"
        "assert not any(name.startswith('workbench') for name in sys.modules)\n"
        "torch.save(given, 'got.pt')\n"
    )
    command = [sys.executable, "-I", "-c", program, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    got = torch.load(tmp_path / "got.pt")
    assert_right(got[ATTENTION])
    expected = torch.empty(2, 2048, dtype=torch.int32)
    flashdsa.dsa_topk_indexer(*got[INDEXER][:5], expected)
    assert torch.equal(got[INDEXER][5], expected)
