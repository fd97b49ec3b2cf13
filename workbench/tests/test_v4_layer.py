"""What `python -m workbench v4-layer` times: V4's layers, whole and by part, judged."""

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

OF_ALL = {
    parts.PROJECTIONS, parts.NORMS, parts.ROTATION, parts.LISTS, parts.ATTENTION,
    parts.OUTPUT_ROTATION, parts.OUTPUT_PROJECTIONS,
}  # fmt: skip
OF_HCA = OF_ALL | {parts.ENTRY_PROJECTIONS, parts.ENTRIES, parts.ENTRIES_REST}
PARTS_OF = {"window": OF_ALL, "HCA": OF_HCA, "CSA": set(parts.PARTS)}


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
        forward, both = (one["wholes"][OURS][what] for what in ("forward", "forward and backward"))
        whole = both["device"]["median"]
        assert 0 < forward["device"]["median"] < whole
        sums = sum(part["forward"] + part["backward"] for part in one["parts"].values())
        assert sums + sum(one["rest_small_kernels"]) == pytest.approx(whole)
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
