"""Checkpoints in the layout that DeepSeek publishes: V3, V3.1, V3.2, and those of a run.

Shards of safetensors with an index, float8 weights in blocks of 128 x 128 beside their
`weight_scale_inv`, each expert by itself. A rank reads the rows that it keeps. transformers 5.24
refuses to dequantise the 576 rows of `kv_a_proj_with_mqa`, which are no whole number of blocks.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32RotaryEmbedding

from examples.dense_to_sparse.model import blocks, learner
from flashdsa.integrations.transformers import enable

INDEX = "model.safetensors.index.json"
BLOCK = 128
OF_THE_FILES = (
    "auto_map", "dtype", "layer_types", "model_type", "num_nextn_predict_layers",
    "quantization_config", "torch_dtype", "transformers_version",
)  # fmt: skip
"""Fields of config.json that say nothing of the model that learns."""
EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Matrices of an expert that transformers keeps in one tensor of all experts."""


def config_of(folder: Path) -> DeepseekV32Config:
    """The configuration of a checkpoint; a dense one gets the indexer of DeepSeek-V3.2. Layers that
    predict more tokens are left out, and weights are learned in fp32."""
    fields = json.loads((folder / "config.json").read_text())
    for name in OF_THE_FILES:
        fields.pop(name, None)
    return DeepseekV32Config(**fields | {"architectures": ["DeepseekV32ForCausalLM"]})


def _files_of(index: Path) -> dict[str, str]:
    """Names of tensors, each with the name of its file, which lies beside the index.

    Raises:
        ValueError: the index says something else.
    """
    try:
        document = json.loads(index.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{index}: expected JSON; got {error}") from None
    found = document.get("weight_map") if isinstance(document, dict) else None
    files: dict[str, str] = found if isinstance(found, dict) else {}
    wrong = [
        one
        for one in files.values()
        if not isinstance(one, str) or one == ".." or Path(one).name != one
    ]
    if not files or wrong:
        said = f"got {wrong[0]!r}" if wrong else "it has none"
        raise ValueError(f"{index}: expected weight_map, names of files beside it; {said}")
    return files


class Published:
    """Tensors of a checkpoint by their names, dequantised."""

    def __init__(self, folder: Path) -> None:
        """Read the index alone."""
        self.folder = folder
        self._open: dict[str, Any] = {}
        if (folder / INDEX).exists():
            self.files = _files_of(folder / INDEX)
        else:
            name = "model.safetensors"
            self._open[name] = safe_open(folder / name, "pt")
            self.files = dict.fromkeys(self._open[name].keys(), name)

    def _slice(self, name: str) -> Any:
        if name not in self.files:
            raise ValueError(f"{self.folder}: expected a tensor {name}; the index has none")
        file = self.files[name]
        if file not in self._open:
            self._open[file] = safe_open(self.folder / file, "pt")
        return self._open[file].get_slice(name)

    def rows(self, name: str, rows: slice) -> Tensor:
        """Some rows of a tensor; fp32 if it is stored in float8."""
        x: Tensor = self._slice(name)[rows]
        if x.dtype != torch.float8_e4m3fn:
            return x
        down, across = (torch.arange(n) // BLOCK for n in (rows.stop, x.shape[1]))
        scale = self._slice(f"{name}_scale_inv")[:].float()
        found: Tensor = x.float() * scale[down[rows]][:, across]
        return found

    def experts(self, parts: list[list[str]], rows: slice) -> Tensor:
        """Some experts' matrices, of each below one another, [rows, n, k]."""
        whole = [
            [self.rows(one, slice(0, self._slice(one).get_shape()[0])) for one in names]
            for names in parts[rows]
        ]
        return torch.stack([torch.cat(matrices) for matrices in whole])


def _parts(name: str, count: int) -> list[list[str]]:
    """Published names of each expert's matrices that transformers has below one another in one
    tensor; empty for any other tensor."""
    prefix, _, kind = name.rpartition(".")
    if not prefix.endswith(".experts"):
        return []
    return [[f"{prefix}.{n}.{one}.weight" for one in EXPERTS[kind]] for n in range(count)]


def build(config: DeepseekV32Config, device: torch.device, mesh: DeviceMesh | None = None) -> Any:
    """A `learner` without values, its parameters spread over the mesh by FSDP2."""
    with torch.device("meta"):
        model = learner(config)
    if mesh is not None:
        for layer in blocks(model):
            fully_shard(layer.self_attn, mesh=mesh)
            fully_shard(layer.mlp, mesh=mesh)
        fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    model.model.rotary_emb = DeepseekV32RotaryEmbedding(config).to(device)  # in no checkpoint
    return model


def load(model: nn.Module, folder: Path | None, seed: int = 0) -> None:
    """Give the model values: all drawn anew without a folder, indexers if the checkpoint has none.

    Raises:
        ValueError: the checkpoint lacks a tensor, or has it in another shape; both are named.
    """
    published = None if folder is None else Published(folder)
    fresh = published is not None and not any(".indexer." in name for name in published.files)
    generator = torch.Generator().manual_seed(seed)
    for name, target in model.state_dict().items():
        parts = _parts(name, len(target))
        if published is None or (fresh and ".indexer." in name):
            _fill(name, target, _drawn(name, target.shape, generator).__getitem__)
        elif parts:
            _fill(name, target, partial(published.experts, parts))
        else:
            _fill(name, target, partial(published.rows, name))


def _drawn(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """As transformers does: normal, of size 0.02; norms and biases at rest."""
    if len(shape) > 1:
        return torch.randn(shape, generator=generator) * 0.02
    return torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)


def _fill(name: str, target: Tensor, read: Callable[[slice], Tensor]) -> None:
    """Write this rank's rows."""
    first = 0
    if isinstance(target, DTensor):
        _, (first, *_) = compute_local_shape_and_global_offset(
            target.shape, target.device_mesh, target.placements
        )
        target = target.to_local()
        if not len(target):  # there are more ranks than rows
            return
    found = read(slice(first, first + len(target)))
    if found.shape != target.shape:
        raise ValueError(f"{name}: expected {tuple(target.shape)}; got {tuple(found.shape)}")
    with torch.no_grad():
        target.copy_(found)


def save(model: Any, folder: Path) -> None:
    """Write the published layout, not quantised; rank 0 gathers all of it in its memory."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    tensors: dict[str, Any] = get_model_state_dict(model, options=whole)
    if dist.is_initialized() and dist.get_rank():
        return
    made: dict[str, Tensor] = {}
    for name in list(tensors):
        x = tensors.pop(name)
        parts = _parts(name, len(x))
        if not parts:
            made[name] = x.clone()  # what was gathered may be a part of a longer buffer
        for number, names in enumerate(parts):
            made |= zip(names, (y.clone() for y in x[number].chunk(len(names))), strict=True)
    unfinished = folder.with_suffix(".unfinished")
    for old in (unfinished, folder):
        shutil.rmtree(old, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save_torch_state_dict(made, unfinished)
    model.config.dtype = model.dtype
    model.config.save_pretrained(unfinished)
    unfinished.rename(folder)


def in_transformers(model: Any) -> Any:
    """The same weights in transformers' own layers, whose attention and indexer flashdsa takes
    over."""
    with torch.device(model.device):
        theirs = DeepseekV32ForCausalLM(model.config)
    theirs.load_state_dict(model.state_dict())
    if model.device.type == "cuda":
        round_parameters(theirs)
    return enable(theirs.eval(), indexer="fp8")


def round_parameters(model: nn.Module) -> None:
    """To bfloat16, but not the rotary frequencies, which `model.bfloat16()` would round, too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
