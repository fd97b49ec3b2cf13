"""`workbench engines`: verdicts, the checkpoint, packing, without vLLM and without a GPU."""

from __future__ import annotations

import json
import struct
import sys
import zipfile
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tvm_ffi
from click.testing import CliRunner

import flashdsa
from flashdsa.errors import ArgumentValueError
from flashdsa.jit.loader import installed_hash
from flashdsa.plan.kernel_spec import KernelPlan, KernelSpec, Variant
from tests.support.stubs import stub
from workbench.__main__ import cli
from workbench.engines import checkpoint, pack, sglang_process, sglang_run, vllm_run
from workbench.engines.fat_binary import keep_architecture
from workbench.pretended_gpu import PretendedGpu, pretended_gpu

SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "q_lora_rank": 16,
    "num_attention_heads": 2, "num_key_value_heads": 2, "index_n_heads": 2, "index_topk": 32,
}  # fmt: skip


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    """An entry of a fat binary."""
    head = struct.pack("<HHIQ", kind, 1, 64, len(code)) + bytes(12)
    return head + struct.pack("<I", architecture) + bytes(64 - len(head) - 4) + code


def fat_binary(*entries: bytes) -> bytes:
    held = b"".join(entries)
    return b"\x50\xed\x55\xba" + struct.pack("<HHQ", 1, 16, len(held)) + held


def test_machine_code_of_one_architecture_stays() -> None:
    """The magic number alone is left; PTX and other code go; a binary without it keeps headers."""
    kept = entry(2, 90, b"hopper" * 20)
    ptx, other = entry(1, 90, b"ptx!" * 9), entry(2, 100, b"black" * 9)
    data = bytearray(
        b"\x50\xed\x55\xba--------" + fat_binary(ptx, kept, other) + b"between" + fat_binary(other)
    )
    size = len(data)
    keep_architecture(data, 90)
    assert len(data) == size and data.count(b"hopper") == 20
    assert b"ptx!" not in data and b"black" not in data and b"between" in data
    assert data.startswith(b"\x50\xed\x55\xba--------" + fat_binary(kept))
    assert data.endswith(fat_binary(entry(2, 100, bytes(45))))


@pytest.mark.parametrize(
    ("engine", "name", "wanted"),
    [
        (pack.VLLM, "vllm/engine/arg_utils.py", True),
        (pack.VLLM, "vllm/_flashmla_C.abi3.so", True),
        (pack.VLLM, "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", True),
        (pack.VLLM, "vllm/_qutlass_C.abi3.so", False),
        (pack.VLLM, "vllm/third_party/deep_gemm/include/a.cuh", True),
        (pack.VLLM, "vllm/third_party/other/a.cuh", False),
        (pack.VLLM, "xgrammar/libxgrammar.so", True),
        (pack.VLLM, "xgrammar/tests/test_a.py", False),
        (pack.VLLM, "vllm/vllm-rs", False),
        (pack.SGLANG, "sgl_kernel/sm90/common_ops.abi3.so", True),
        (pack.SGLANG, "sgl_kernel/sm100/common_ops.abi3.so", False),
        (pack.SGLANG, "sgl_kernel/flash_ops.abi3.so", False),
        (pack.SGLANG, "sglang/jit_kernel/include/sgl_kernel/vec.cuh", True),
        (pack.SGLANG, "sglang/multimodal_gen/registry.py", False),
        (pack.SGLANG, "tvm_ffi/lib/libtvm_ffi.so", True),
    ],
)
def test_files_of_the_wheels_that_are_carried(engine: pack.Engine, name: str, wanted: bool) -> None:
    assert engine.is_wanted(name) == wanted


def test_kernels_that_are_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel that the engines' calls take on an H200, prompts and decodes, both caches."""
    taken: set[str] = set()

    def noted(self: PretendedGpu, spec: KernelSpec, plan: KernelPlan) -> Any:
        taken.add(Variant(spec, plan).name)
        return tvm_ffi.get_global_func("testing.nop")

    monkeypatch.setattr(PretendedGpu, "num_sms", 132)
    monkeypatch.setattr(
        PretendedGpu, "cluster_capacity", lambda *_: {1: 132, 2: 66, 4: 33, 8: 16, 16: 8}
    )
    monkeypatch.setattr(PretendedGpu, "function", noted)
    rows = torch.zeros(64, 576, dtype=torch.bfloat16), torch.zeros(64, 656, dtype=torch.uint8)
    with pretended_gpu():
        lengths = (1, 2, 3, 4, 6, 8, 12, 24, 40, 64, 132, 256, 700, 2048, 5000)
        for tokens, heads in product(lengths, (64, 128)):
            q = torch.zeros(1, heads, 576, dtype=torch.bfloat16).expand(tokens, -1, -1)
            ids = torch.zeros(tokens, 2048, dtype=torch.int32)
            for kv in rows:
                flashdsa.sparse_mla_fwd(q, kv, ids, topk_length=ids[:, 0], backend="sm90")
        fp8 = torch.zeros(1, 64, 128).to(torch.float8_e4m3fn)
        cache = torch.zeros(128, 64, 1, 132, dtype=torch.uint8)
        for next_n, requests, pages in product(
            (1, 2, 3, 4), (1, 4, 8, 16, 64, 256), (1, 33, 128, 1024)
        ):
            size = (requests, next_n) if next_n > 1 else (requests,)
            flashdsa.dsa_topk_indexer(
                fp8.expand(*size, -1, -1), cache, torch.zeros(*size, 64),
                torch.zeros(size, dtype=torch.int32),
                torch.zeros(requests, pages, dtype=torch.int32),
                torch.zeros(*size, 2048, dtype=torch.int32), ids="position", backend="sm90",
            )  # fmt: skip
        for tokens, keys in product((1, 40, 700, 2048, 8192, 16384), (40, 2048, 8192, 32768)):
            ends = torch.zeros(tokens, dtype=torch.int32)
            flashdsa.dsa_topk_prefill(
                fp8.expand(tokens, -1, -1), fp8[0, :1].expand(keys, -1), torch.zeros(tokens, 64),
                ends, ends, torch.zeros(tokens, 2048, dtype=torch.int32),
                k_scale=torch.zeros(keys), backend="sm90",
            )  # fmt: skip
    assert len(taken) > 10
    assert taken <= set(pack.needed_kernels()), taken - set(pack.needed_kernels())


OF_THESE_SOURCES = f"flashdsa kernels of sources {installed_hash('sm90')};".encode()
"""An object's mark, which says what it was compiled from."""


def test_archives_are_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM for the path, kernels beside flashdsa, the plugin's name, no import of CuTe DSL."""
    archives, folder = tmp_path / "archives", tmp_path / "unpacked"
    archives.mkdir()
    with pytest.raises(ArgumentValueError, match=r"has no vllm.tar.xz, fa3.tar.xz, flash"):
        pack.unpack(archives, folder, pack.VLLM)
    (query,) = pack.VLLM.written
    for name, files in zip(
        pack.VLLM.archives,
        ({query.path: b"import cutlass"}, {"vllm/fa3.so": b"3"},
         {f"{pack.KERNELS}/sm90.so": b"90"}),
        strict=True,
    ):  # fmt: skip
        assert pack._write(archives / name, files) == (archives / name).stat().st_size
    monkeypatch.setattr(pack, "installed_object", lambda _: tmp_path / "kernels" / "sm90.so")
    monkeypatch.setattr(pack, "find_spec", lambda _: None)
    with pytest.raises(ArgumentValueError, match="kernels of other sources; --pack again"):
        pack.unpack(archives, folder, pack.VLLM)
    pack._write(archives / "flashdsa.tar.xz", {f"{pack.KERNELS}/sm90.so": OF_THESE_SOURCES})
    for _ in range(2):
        pack.unpack(archives, folder, pack.VLLM)
    assert (tmp_path / "kernels" / "sm90.so").read_bytes() == OF_THESE_SOURCES
    assert (folder / "vllm" / "fa3.so").read_bytes() == b"3"
    assert "no CuTe DSL" in (folder / query.path).read_text()
    named = (folder / "flashdsa-0.dist-info" / "entry_points.txt").read_text()
    assert "flashdsa.integrations.vllm:register" in named


def test_sglangs_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wheels and this machine's libraries become one archive, and files and plugins are written."""
    archives, kernels = tmp_path / "archives", tmp_path / "kernels"
    wheels = archives / "sglang_wheels"
    wheels.mkdir(parents=True)
    with zipfile.ZipFile(wheels / "sglang.whl", "w") as wheel:
        wheel.writestr("sglang/version.py", "0.5.13")
        wheel.writestr("sgl_kernel/flash_ops.abi3.so", "FA3")
        wheel.writestr("transformers/dependency_versions_check.py", "refuse()")
    library = tmp_path / "libnuma.so.1"
    library.write_bytes(b"numa")
    (archives / "kernels").mkdir()
    (archives / "kernels" / "sm90.so").write_bytes(OF_THESE_SOURCES)
    monkeypatch.setattr(pack, "_download", lambda needs, folder: None)
    monkeypatch.setattr(pack, "_compile", lambda target: None)
    monkeypatch.setattr(pack, "installed_object", lambda _: kernels / "sm90.so")
    engine = pack.SGLANG._replace(libraries=(str(library),))
    assert list(pack.pack(archives, engine)) == ["sglang.tar.xz", "flashdsa.tar.xz"]
    folder = tmp_path / "unpacked"
    pack.unpack(archives, folder, engine)
    assert (folder / "sglang" / "version.py").read_text() == "0.5.13"
    assert not (folder / "sgl_kernel").exists()
    assert (folder / pack.LIBRARIES / "libnuma.so.1").read_bytes() == b"numa"
    assert "refuse" not in (folder / "transformers/dependency_versions_check.py").read_text()
    assert "return None" in (folder / "flashinfer" / "gemm.py").read_text()
    named = (folder / "flashdsa-0.dist-info" / "entry_points.txt").read_text()
    assert "flashdsa_indexer = flashdsa.integrations.sglang:register_indexer" in named
    assert (kernels / "sm90.so").read_bytes() == OF_THESE_SOURCES


@torch.no_grad()
def test_the_checkpoint_answers_alike_twice(tmp_path: Path) -> None:
    """Layers and drafts are there; bf16's error is above 0; prompts are those of each process."""
    checkpoint.make(tmp_path, **SMALL)
    about = json.loads((tmp_path / "config.json").read_text())
    assert about["num_hidden_layers"] == len(about["layer_types"]) == 2
    assert about["num_nextn_predict_layers"] == 1
    found = checkpoint.eager(tmp_path, (5, 20), 3)
    assert found == checkpoint.eager(tmp_path, (5, 20), 3)
    assert [len(one) for one in found["tokens"]] == [len(one) for one in found["gaps"]] == [3, 3]
    assert 0 < found["error"] < 0.5 and all(gap >= 0 for one in found["gaps"] for gap in one)
    model = checkpoint.load(tmp_path, torch.bfloat16)
    prompt = checkpoint.prompts((5,))[0]
    best = model(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1).topk(2)
    assert int(best.indices[0]) == found["tokens"][0][0]
    assert float(best.values[0] - best.values[1]) == pytest.approx(found["gaps"][0][0], abs=0.02)


def answer(folder: Path, tokens: list[list[int]]) -> Any:
    """Processes that write these tokens for vLLM, and fail for the backend BROKEN."""

    def run(words: list[str], gpu: int) -> str:
        if words[0] == "eager":
            eager = {"tokens": [[1, 2], [3, 4]], "gaps": [[0.5, 0.1], [0.5, 0.3]], "error": 0.05}
            Path(words[2]).write_text(json.dumps(eager))
        if words[0] == "vllm":
            if words[3] == "BROKEN":
                return "it broke"
            got = {"tokens": tokens, "calls": {"attend": 4}, "graphs": "NONE", "seconds": 1.0}
            Path(words[2]).write_text(json.dumps(got))
        return ""

    return run


def test_verdicts(tmp_path: Path) -> None:
    """Another token is right where the two best are close: 0.1 with a bf16 cache, 1.6 with fp8."""
    run = answer(tmp_path, [[1, 9], [3, 9]])
    found = vllm_run.measure(("OURS", "BROKEN"), ("eager", "eager+fp8"), tmp_path, run)
    ours, broken, packed, _ = found["rows"]
    assert [(one["equal"], one["gap"], one["right"]) for one in ours["prompts"]] == [
        (1, 0.1, True),
        (1, 0.3, False),
    ]
    assert broken["failure"] == "it broke" and all(one["right"] for one in packed["prompts"])
    assert [line.splitlines()[0] for line in vllm_run.findings(found)] == [
        "eager, OURS: prompt 1: token 1 differs where the two best are 0.300 apart; expected at "
        "most 0.100",
        "eager, BROKEN: failed",
        "eager+fp8, BROKEN: failed",
    ]
    with pytest.raises(RuntimeError, match="make: no memory"):
        vllm_run.measure(("OURS",), ("eager",), tmp_path / "other", lambda words, gpu: "no memory")
    with pytest.raises(ArgumentValueError, match=r"--case: expected graphs, .* got 'fp4'"):
        vllm_run.measure(("OURS",), ("eager+fp4",), tmp_path, run)


def test_the_command_prints_and_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = answer(tmp_path, [[1, 2], [3, 9]])
    monkeypatch.setattr(vllm_run, "in_a_process", lambda words, gpu, path, log: run(words, gpu))
    words = ["engines", "vllm", "OURS", "--case", "graphs", "--folder", str(tmp_path)]
    shown = CliRunner().invoke(cli, [*words, "--out", str(tmp_path / "out.json")])
    assert shown.exit_code == 1 and "2, 1 (0.300)" in shown.stdout and "4 0 0 0" in shown.stdout
    assert "graphs, OURS: 2, 1 (0.300)" in shown.stderr
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["rows"][0]["prompts"][0] == {"equal": 2, "of": 2, "gap": None, "right": True}
    assert json.loads(CliRunner().invoke(cli, [*words, "--json"]).stdout) == written


def test_a_process_that_fails_or_hangs_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "make.log"
    assert "TypeError" in vllm_run.in_a_process(["make"], 0, "", log)
    assert "TypeError" in log.read_text()
    monkeypatch.setattr(vllm_run, "LIMIT_SECONDS", 0.1)
    assert "still running after 0.1 s" in vllm_run.in_a_process(["make", "nowhere"], 0)


def test_sglangs_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers runs without SGLang's folder; SGLang's process is told its plugins."""
    told: list[Any] = []

    def run(*given: Any) -> str:
        told.append(given)
        return ""

    monkeypatch.setattr(vllm_run, "in_a_process", run)
    log = tmp_path / "out.log"
    sglang_run.in_a_process(["eager", "model", "out.json"], 1, "folder", log)
    assert told.pop() == (["eager", "model", "out.json"], 1, "", log)
    words = ["vllm", "model", "folder/out.json", "flashdsa", "{}"]
    assert sglang_run.in_a_process(words, 1, "folder", log) == ""
    given, gpu, path, _, module, environment, limit = told.pop()
    assert (given, gpu, path) == (["model", "folder/out.json", "{}"], 1, "folder")
    assert module == "workbench.engines.sglang_process" and limit == sglang_run.LIMIT_SECONDS
    assert environment["SGLANG_PLUGINS"] == "flashdsa,flashdsa_counts"
    assert environment["LD_LIBRARY_PATH"].startswith("folder/libraries")
    assert environment[sglang_process.COUNTS] == "folder/out.counts"


def test_sglangs_cases(tmp_path: Path) -> None:
    """Arguments are Engine's; verdicts are vLLM's."""
    seen: list[dict[str, Any]] = []
    answers = answer(tmp_path, [[1, 2], [3, 4]])

    def run(words: list[str], gpu: int) -> str:
        if words[0] == "vllm":
            seen.append(json.loads(words[4]))
        return str(answers(words, gpu))

    found = sglang_run.measure(("flashdsa",), ("eager+fp8",), tmp_path, run)
    assert all(one["right"] for one in found["rows"][0]["prompts"])
    assert seen[0]["disable_cuda_graph"] and seen[0]["dsa_decode_backend"] == "flashmla_kv"
    with pytest.raises(ArgumentValueError, match=r"--case: expected graphs, .* got 'drafts'"):
        sglang_run.measure(("flashdsa",), ("drafts",), tmp_path, run)


def test_calls_are_counted_into_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[str, Any] = {}
    stub(
        monkeypatch,
        "sglang.srt.plugins.hook_registry",
        HookRegistry=SimpleNamespace(
            register=lambda target, hook, kind: registered.update({target: (hook, kind)})
        ),
        HookType=SimpleNamespace(AROUND="around"),
    )
    module = SimpleNamespace(sparse_mla_fwd=lambda one, *, two: one + two)
    monkeypatch.setattr(sglang_process, "OURS", {"ours": ("sparse_mla_fwd",)})
    monkeypatch.setitem(sys.modules, "ours", module)
    monkeypatch.setenv(sglang_process.COUNTS, str(tmp_path / "counts"))
    sglang_process.count_calls()
    assert module.sparse_mla_fwd(1, two=2) == 3 and module.sparse_mla_fwd(1, two=3) == 4
    (target,) = (one for one in registered if one.endswith("._forward_flashmla_kv"))
    hook, kind = registered[target]
    assert kind == "around" and hook(lambda self, q: (self, q), "backend", q="q") == (
        "backend",
        "q",
    )
    counts = json.loads((tmp_path / "counts").read_text())
    assert counts == {"sparse_mla_fwd": 2, "_forward_flashmla_kv": 1}


def test_sglangs_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = answer(tmp_path, [[1, 2], [3, 9]])
    monkeypatch.setattr(sglang_run, "in_a_process", lambda words, gpu, path, log: run(words, gpu))
    words = ["engines", "sglang", "none", "--case", "graphs", "--folder", str(tmp_path)]
    shown = CliRunner().invoke(cli, [*words, "--out", str(tmp_path / "out.json")])
    assert shown.exit_code == 1 and "2, 1 (0.300)" in shown.stdout
    assert "graphs, none: prompt 1: token 1 differs" in shown.stderr
