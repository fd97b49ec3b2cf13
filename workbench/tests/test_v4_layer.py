"""`python -m workbench v4-layer`: V4's layers, whole and by part, judged and timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("transformers.models.deepseek_v4", reason="needs a newer transformers")

from workbench.__main__ import cli
from workbench.v4_layer import parts
from workbench.v4_layer.layers import KINDS, OURS, build, judge

OF_CSA = set(parts.PARTS)
OF_HCA = {part for part in OF_CSA if not part.startswith("index")}
OF_WINDOW = {part for part in OF_HCA if not part.startswith("entries")}
PARTS_OF = {"window": OF_WINDOW, "CSA": OF_CSA, "HCA": OF_HCA}


def test_the_command_times_every_part_of_every_kind(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    given = ["v4-layer", "--device", "cpu", "--tokens", "64", "--repeats", "1", "--out", str(out)]
    shown = CliRunner().invoke(cli, given)
    assert shown.exit_code == 0, shown.output
    assert max(map(len, shown.stdout.splitlines())) <= 80
    document = json.loads(out.read_text())
    assert document["sizes"]["hidden_size"] == 64
    for kind, one in document["layers"].items():
        assert set(one["parts"]) == PARTS_OF[kind]
        whole = one["wholes"][OURS]["forward and backward"]["device"]["median"]
        assert sum(map(sum, one["parts"].values())) + sum(one["remainder"]) == pytest.approx(whole)
        assert not one["findings"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_alone_has_the_gradients_of_the_layer(kind: str) -> None:
    """So it is called with its own arguments and the gradient that reaches its result."""
    inputs, layers, _ = build(64, "cpu", 0)
    layer = layers[kind][OURS]
    spans = parts.record(layer, inputs)
    compared = 0
    for span in spans:
        _, backward = parts.replays(span)
        weights = [] if span.owner is None else list(span.owner.parameters(recurse=False))
        if backward is not None and weights:
            own = backward()[-len(list(span.owner.parameters())) :]
            assert all(torch.equal(x, w.grad) for x, w in zip(own, weights, strict=False))
            compared += len(weights)
    assert compared == {"window": 7, "CSA": 10, "HCA": 10}[kind]


def test_a_layer_that_is_off_is_found() -> None:
    inputs, layers, _ = build(64, "cpu", 0)
    with torch.no_grad():
        layers["HCA"][OURS].attention.compressor.kv_norm.weight[:8] = 0.5
    wrong = {name for name, error in judge(layers["HCA"], inputs).items() if not error.is_allowed}
    assert {"output", "hidden", "compressor.kv_proj.weight"} <= wrong


def test_a_sample_that_the_host_was_late_for_is_taken_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU that is not there: each call takes a millisecond more than the one before."""
    clock: list[str] = []
    spins: list[int] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.calls = len(clock)

        def query(self) -> bool:
            return len(spins) == 1  # late in the first sample only

        def elapsed_time(self, end: Event) -> float:
            return sum(range(self.calls + 1, end.calls + 1))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", spins.append)
    found = parts.in_turns({"x": lambda: clock.append("x")}, "cuda", 1, 0)["x"]
    assert len(clock) == parts.WARMUP_CALLS + 4 and spins[1] > spins[0]
    assert (found.elapsed.median, found.device.median) == (1e3 * 6, 1e3 * 7)
    assert 0 < found.host.median < 1e5 and found.device.late == 0
