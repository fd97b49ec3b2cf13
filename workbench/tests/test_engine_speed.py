"""`workbench engines speed` without vLLM and without a GPU: caches, steps, rounds, their table."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from tests.support.stubs import stub
from workbench.__main__ import cli
from workbench.engines import vllm_run, vllm_server, vllm_speed


def test_caches_hold_random_rows_with_scales_of_one() -> None:
    """Pages may lie apart: what is between them stays."""
    rows = torch.zeros(3, 64, 576, dtype=torch.bfloat16)
    vllm_speed.fill(rows)
    assert 0.9 < rows.float().std() < 1.1
    index = torch.zeros(3, 2, 64, 132, dtype=torch.uint8)
    vllm_speed.fill(index[:, 0])
    pages = index[:, 0].flatten(1)
    assert (pages[:, 64 * 128 :].view(torch.float32) == 1).all() and not index[:, 1].any()
    assert 0.9 < pages[:, : 64 * 128].view(torch.float8_e4m3fn).float().std() < 1.1
    packed = torch.zeros(3, 64, 656, dtype=torch.uint8)
    vllm_speed.fill(packed)
    assert (packed[..., 512:528].view(torch.float32) == 1).all()
    for part in (packed[..., :512].view(torch.float8_e4m3fn), packed[..., 528:]):
        values = part.view(torch.bfloat16) if part.dtype == torch.uint8 else part
        assert 0.9 < values.float().std() < 1.1


class Steps:
    """An engine whose requests get a token a step, of 0.5 s from the third on, 9 s before."""

    def __init__(self) -> None:
        self.asked: dict[str, tuple[int, int]] = {}
        self.tokens = self.now = 0.0

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        self.asked[name] = len(prompt["prompt_token_ids"]), params.max_tokens
        self.tokens = 0

    def has_unfinished_requests(self) -> bool:
        return any(self.tokens < new for _, new in self.asked.values())

    def step(self) -> list[Any]:
        self.now += 9 if self.tokens < 2 else 0.5
        self.tokens += 1
        ids = [0] * int(self.tokens)
        return [
            SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=ids)])
            for name in self.asked
        ]


def test_steps_are_timed_after_the_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps()
    monkeypatch.setattr("time.perf_counter", lambda: steps.now)
    stub(monkeypatch, "vllm", SamplingParams=SimpleNamespace)
    engine = object.__new__(vllm_speed.Engine)
    engine.engine, engine.names = steps, count()
    assert engine.decode(3, 100) == pytest.approx(0.5)
    assert list(steps.asked.values()) == [(100, vllm_speed.STEPS + vllm_speed.WARM)] * 3
    assert engine.computed
    steps.asked.clear()
    assert engine.first_token(40) == pytest.approx(9) and not engine.computed


def row_of(backend: str, seconds: float) -> str:
    return json.dumps(
        {"step": {"8 x 100": seconds}, "first": {"1 x 50": 2 * seconds}, "cache": "auto"}
    )


def test_rounds_run_there_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    times = iter((0.1, 0.4, 0.2, 0.3))

    def run(words: list[str], *_: Any) -> str:
        if words[0] == "run":
            ran.append(words[3])
            if words[3] == "BROKEN":
                return "no memory"
            Path(words[2]).write_text(row_of(words[3], next(times)))
        return ""

    found = vllm_run.measure_speed(("OURS", "THEIRS"), tmp_path, run)
    assert ran == ["OURS", "THEIRS", "THEIRS", "OURS"]
    assert found["schema"] == vllm_run.SCHEMA and found["machine"]["cpu"]
    assert vllm_run.speeds(found["rows"]) == {
        "step 8 x 100": {"OURS": pytest.approx(80), "THEIRS": pytest.approx(40)},
        "first 1 x 50": {"OURS": pytest.approx(200), "THEIRS": pytest.approx(400)},
    }
    busy = [{"8 x 100": [["all kernels", 9, time], ["one", 1, 1.0]]} for time in (3.0, 2.0)]
    of_gpu = [{"backend": "OURS", "kernels": one} for one in [*busy, {"8 x 100": []}]]
    assert vllm_run.busy_times(of_gpu) == {"8 x 100": {"OURS": 2.0}}
    with pytest.raises(RuntimeError, match="BROKEN: no memory"):
        vllm_run.measure_speed(("BROKEN",), tmp_path, run)
    times = iter((0.1, 0.2))
    monkeypatch.setattr(vllm_run, "in_a_process", run)
    words = ["engines", "speed", "OURS", "--rounds", "2", "--folder", str(tmp_path)]
    shown = CliRunner().invoke(cli, words)
    assert shown.exit_code == 0 and "80 tokens/s" in shown.stdout and "200 ms" in shown.stdout


def test_a_server_gets_llms_arguments_as_flags_and_the_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in answers with a prompt's length; one that ends at once is told of."""
    given = {"dtype": "auto", "enforce_eager": True, "enable_prefix_caching": False, "x": {"a": 1}}
    assert vllm_server.flags(given) == [
        "--dtype", "auto", "--enforce-eager", "--no-enable-prefix-caching", "--x", '{"a": 1}',
    ]  # fmt: skip
    folder = tmp_path / "vllm" / "entrypoints" / "cli"
    folder.mkdir(parents=True)
    (folder / "main.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = vllm_server.generate(tmp_path, "OURS", {"dtype": "auto"})
    assert found["tokens"] == [[n] for n in (40, 700, 2500, 5000)]
    (folder / "main.py").write_text("raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="the server ended with 3"):
        vllm_server.generate(tmp_path, "OURS", {})


STAND_IN = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/inference/v1/generate" and asked["sampling_params"]["ignore_eos"]
        self.send_response(200); self.end_headers()
        answer = {"choices": [{"token_ids": [len(asked["token_ids"])]}]}
        self.wfile.write(json.dumps(answer).encode())

assert sys.argv[1] == "serve" and "--tokens-only" in sys.argv and "OURS" in sys.argv
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
