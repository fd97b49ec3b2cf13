"""A checkpoint in DeepSeek's layout is read and written; ranks read their rows in
test_two_ranks.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV32ForCausalLM

from examples.dense_to_sparse.checkpoint import (
    Published,
    build,
    config_of,
    load,
    round_parameters,
    save,
)
from examples.dense_to_sparse.model import Attended, run
from tests.examples.published import CONFIG, EXPERTS, write

TOKENS = torch.randint(256, (80,), generator=torch.Generator().manual_seed(1))


def read(folder: Path) -> Any:
    model = build(config_of(folder), torch.device("cpu"))
    load(model, folder)
    return model


def meant_by(values: dict[str, Tensor], name: str) -> Tensor:
    """The value of a tensor of transformers."""
    experts, _, kind = name.partition(".experts.")
    if kind not in ("gate_up_proj", "down_proj"):
        return values[name]
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    one = [[f"{experts}.experts.{n}.{part}.weight" for part in parts] for n in range(EXPERTS)]
    return torch.stack([torch.cat([values[part] for part in names]) for names in one])


def test_every_weight_is_what_the_blocks_stand_for(tmp_path: Path) -> None:
    values = write(tmp_path / "v32")
    model = read(tmp_path / "v32")
    for name, found in model.state_dict().items():
        torch.testing.assert_close(
            found.double(), meant_by(values, name), rtol=1e-7, atol=0, msg=name
        )


@pytest.mark.parametrize("rows", [slice(0, 576), slice(100, 300), slice(500, 576), slice(7, 7)])
def test_rows_that_are_no_whole_blocks(rows: slice, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    values = write(tmp_path / "v32")
    found = Published(tmp_path / "v32").rows(name, rows)
    torch.testing.assert_close(found.double(), values[name][rows], rtol=1e-7, atol=0)


def theirs(model: Any) -> Any:
    """transformers' own eager model of the same weights."""
    made = DeepseekV32ForCausalLM(model.config).eval()
    made.load_state_dict(model.state_dict())
    made.set_attn_implementation("eager")
    return made


@torch.no_grad()
def test_dense_and_sparse_attention_are_transformers_own(tmp_path: Path) -> None:
    """Logits of two layers, of which the second has experts: YaRN's angles and scale, absorbed and
    expanded forms. Where keys are selected, transformers attends to the recipe's."""
    write(tmp_path / "v32")
    model = read(tmp_path / "v32")
    assert model.config.rope_parameters["rope_type"] == "yarn"
    eager = theirs(model)
    for sparse in (False, True):
        logits, attended = run(model, TOKENS, sparse=sparse)
        for layer, seen in zip(eager.model.layers, attended, strict=True):
            layer.self_attn.indexer.forward = lambda *_, seen=seen, **__: positions(seen)
        torch.testing.assert_close(logits, eager(TOKENS[None]).logits[0], rtol=1e-4, atol=1e-4)


def positions(seen: Attended) -> Tensor:
    if seen.indices is None:
        return torch.arange(len(TOKENS), dtype=torch.int32).expand(1, len(TOKENS), -1)
    return seen.indices.clamp_min(0)[None]  # unused slots: a query that sees few sees key 0


@torch.no_grad()
def test_the_index_is_transformers_own(tmp_path: Path) -> None:
    """Its columns are rotated by halves, those of the attention by neighbours."""
    write(tmp_path / "v32")
    model = read(tmp_path / "v32")
    chosen: list[Tensor] = []
    for layer in (eager := theirs(model)).model.layers:
        layer.self_attn.indexer.register_forward_hook(lambda *x: chosen.append(x[2][0]))
    eager(TOKENS[None])
    # The first layer's inputs are the same whatever is selected.
    (q, k, weights) = run(model, TOKENS, sparse=False)[1][0].indexed
    scores = (torch.einsum("shd,td->sht", q, k).relu() * weights[:, :, None]).sum(1)
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    expected = scores.masked_fill(future, -torch.inf).topk(24).indices
    late = slice(24, None)  # earlier queries see fewer keys than are chosen
    assert torch.equal(chosen[0][late].sort().values, expected[late].int().sort().values)


def test_rounded_parameters_turn_by_the_same_angles(tmp_path: Path) -> None:
    write(tmp_path / "v32")
    model = read(tmp_path / "v32")
    at = torch.tensor([[0, 1, 100_000]])
    before = model.model.rotary_emb(torch.zeros(1), at)
    round_parameters(model)
    assert model.dtype == torch.bfloat16
    for found, expected in zip(model.model.rotary_emb(torch.zeros(1), at), before, strict=True):
        assert torch.equal(found, expected)


def test_a_dense_checkpoint_gets_new_indexers(tmp_path: Path) -> None:
    values = write(tmp_path / "v3", indexer=False)
    model = read(tmp_path / "v3")
    assert (model.config.model_type, model.config.index_topk) == ("deepseek_v32", 2048)
    for name, found in model.state_dict().items():
        if ".indexer." not in name:
            assert torch.equal(found.double(), meant_by(values, name).float().double()), name
        elif name.endswith("proj.weight"):
            assert float(found.std()) == pytest.approx(0.02, rel=0.1)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "v32"
    write(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for name in (
        "model.layers.1.self_attn.indexer.wk.weight",
        "model.layers.0.self_attn.kv_b_proj.weight_scale_inv",
        "model.layers.1.mlp.experts.2.up_proj.weight",
    ):
        less = {key: file for key, file in index["weight_map"].items() if key != name}
        path.write_text(json.dumps({"weight_map": less}))
        with pytest.raises(ValueError, match=f"v32: expected a tensor {name}; the index has none"):
            read(folder)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"vocab_size": 300},
            r"model\.embed_tokens\.weight: expected \(300, 160\); got \(256, 160\)",
        ),
        ({"v_head_dim": 64}, "v_head_dim: expected 128; got 64"),
    ],
)
def test_another_shape_is_refused(changed: dict[str, int], said: str, tmp_path: Path) -> None:
    write(tmp_path / "v3", indexer=False)
    (tmp_path / "v3" / "config.json").write_text(json.dumps(CONFIG | changed))
    with pytest.raises(ValueError, match=said):
        read(tmp_path / "v3")


def test_what_a_run_writes_is_the_published_layout(tmp_path: Path) -> None:
    """Experts one by one; transformers reads it, and an engine finds what it looks for."""
    model = read_written(tmp_path)
    again = DeepseekV32ForCausalLM.from_pretrained(tmp_path / "out")
    for name, found in again.state_dict().items():
        assert torch.equal(found, model.state_dict()[name]), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = {
        "architectures": ["DeepseekV32ForCausalLM"],
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }
    assert expected.items() <= config.items()
    assert config["dtype"] == "float32"
    assert not {"quantization_config", "num_nextn_predict_layers"} & config.keys()


def read_written(folder: Path) -> Any:
    values = write(folder / "v32")
    model = read(folder / "v32")
    save(model, folder / "out")
    names = {n for n in values if not n.startswith("model.layers.2.")}
    assert set(Published(folder / "out").files) == names
    return model


@pytest.mark.parametrize(
    "text",
    [
        "{", "[" * 100_000, "7", "[]", "{}", '{"weight_map": 7}', '{"weight_map": {}}',
        '{"weight_map": {"a": 7}}', '{"weight_map": {"a": "../other/x"}}',
        '{"weight_map": {"a": "/etc/x"}}', '{"weight_map": {"a": ".."}}',
    ],
)  # fmt: skip
def test_an_index_names_files_beside_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index\.json: expected"):
        Published(tmp_path)
