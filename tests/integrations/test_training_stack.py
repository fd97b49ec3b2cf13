"""TRL, PEFT and accelerate over enabled models, against the same runs without flashdsa.

`make test-training` installs them. Tiny random models.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="needs transformers >= 5.17")
trl = pytest.importorskip("trl", reason="see make test-training")
peft = pytest.importorskip("peft", reason="see make test-training")
accelerate = pytest.importorskip("accelerate", reason="see make test-training")
datasets = pytest.importorskip("datasets", reason="see make test-training")
tokenizers = pytest.importorskip("tokenizers", reason="needs transformers")

from flashdsa.integrations.transformers import disable, enable  # noqa: E402
from tests.integrations.test_transformers_two_sources import deepseek_v4  # noqa: E402
from tests.support.tiny_models import build, error  # noqa: E402

pytestmark = pytest.mark.slow


def deepseek_v32() -> Any:
    return build("deepseek_v32", index_topk=8)


def glm_moe_dsa() -> Any:
    return build("glm_moe_dsa", index_topk=8)


def two_sources() -> Any:
    torch.manual_seed(0)
    return deepseek_v4(router_aux_loss_coef=0.0)


MODELS = {"deepseek_v32": deepseek_v32, "glm_moe_dsa": glm_moe_dsa, "deepseek_v4": two_sources}
EVERY_MODEL = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
ONE_INDEXER = pytest.mark.parametrize("make", [deepseek_v32, glm_moe_dsa])


def tokenizer(**options: Any) -> Any:
    """Return a tokenizer with one token per character."""
    vocabulary = {chr(code): code for code in range(96)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=" "))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    special = {"pad_token": "!", "eos_token": '"', "bos_token": "#"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special, **options)


def texts(count: int = 12) -> list[str]:
    torch.manual_seed(5)
    return ["".join(map(chr, torch.randint(40, 90, (20 + 3 * n,)).tolist())) for n in range(count)]


def options(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "seed": 0,
        "save_strategy": "no",
        "disable_tqdm": True,
    } | changes


def logged(trainer: Any) -> tuple[Tensor, Tensor]:
    """Train; return each step's loss and gradient norm."""
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 3
    return tuple(torch.tensor([step[name] for step in steps]) for name in ("loss", "grad_norm"))


def assert_same(train: Callable[[Any], Any], make: Callable[[], Any]) -> None:
    """Compare the losses and gradient norms of a run without flashdsa and one with it."""
    model = make()
    model.set_attn_implementation("eager")
    expected, expected_norms = logged(train(model))
    losses, norms = logged(train(enable(make())))
    assert error(losses, expected) < 1e-5 and error(norms, expected_norms) < 1e-4


@EVERY_MODEL
@pytest.mark.parametrize(
    "packing", [{}, {"packing": True}, {"padding_free": True, "max_length": None}], ids=str
)
def test_sft(make: Callable[[], Any], packing: dict[str, Any], tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict({"text": texts()})
    given = trl.SFTConfig(
        **options(tmp_path, gradient_checkpointing=False, **{"max_length": 64} | packing)
    )
    assert_same(
        lambda model: trl.SFTTrainer(
            model, args=given, train_dataset=data, processing_class=tokenizer()
        ),
        make,
    )


@ONE_INDEXER
@pytest.mark.parametrize("target", ["all-linear", ["q_b_proj", "o_proj"]], ids=str)
def test_dpo_with_adapters(make: Callable[[], Any], target: Any, tmp_path: Path) -> None:
    some = texts()
    rows = {"prompt": some[:4], "chosen": some[4:8], "rejected": some[8:]}
    data = datasets.Dataset.from_dict(rows)
    given = trl.DPOConfig(**options(tmp_path, gradient_checkpointing=False))
    assert_same(
        lambda model: trl.DPOTrainer(
            model,
            args=given,
            train_dataset=data,
            processing_class=tokenizer(),
            peft_config=peft.LoraConfig(r=4, target_modules=target, lora_dropout=0.0),
        ),
        make,
    )


@ONE_INDEXER
def test_dpo_loads_its_own_reference(make: Callable[[], Any], tmp_path: Path) -> None:
    """By the name of the trained model's implementation, and without enabling it."""
    some, saved = texts(), tmp_path / "model"
    make().save_pretrained(saved)
    data = datasets.Dataset.from_dict(
        {"prompt": some[:4], "chosen": some[4:8], "rejected": some[8:]}
    )
    given = trl.DPOConfig(**options(tmp_path, gradient_checkpointing=False))

    def load() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(saved)

    assert_same(
        lambda model: trl.DPOTrainer(
            model, args=given, train_dataset=data, processing_class=tokenizer()
        ),
        load,
    )


@ONE_INDEXER
def test_grpo_with_a_reference(make: Callable[[], Any], tmp_path: Path) -> None:
    saved = tmp_path / "model"
    make().save_pretrained(saved)
    data = datasets.Dataset.from_dict({"prompt": texts(4)})
    given = trl.GRPOConfig(
        **options(tmp_path, gradient_checkpointing=False),
        beta=0.1,
        num_generations=2,
        max_completion_length=6,
    )

    def length(completions: list[str], **_: Any) -> list[float]:
        return [float(sum(map(ord, text)) % 7) for text in completions]

    assert_same(
        lambda model: trl.GRPOTrainer(
            model,
            args=given,
            train_dataset=data,
            reward_funcs=length,
            processing_class=tokenizer(padding_side="left"),
        ),
        lambda: transformers.AutoModelForCausalLM.from_pretrained(saved),
    )


def logits(model: Any) -> Tensor:
    torch.manual_seed(6)
    with torch.no_grad():
        found: Tensor = model(input_ids=torch.randint(1, 96, (2, 24)), use_cache=False).logits
    return found


@ONE_INDEXER
def test_adapters_on_every_projection(make: Callable[[], Any]) -> None:
    """Also merged in place and disabled, which keep PEFT's module."""
    torch.manual_seed(7)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    plain = make()
    plain.set_attn_implementation("eager")
    adapted = peft.get_peft_model(plain, config).eval()
    expected = logits(adapted)
    enable(adapted)
    assert error(logits(adapted), expected) < 3e-6
    with adapted.disable_adapter():
        alone = logits(adapted)
        assert error(alone, expected) > 0.05
    adapted.merge_adapter()
    assert error(logits(adapted), expected) < 3e-6
    adapted.unmerge_adapter()
    base = adapted.unload()
    assert error(logits(base), alone) < 3e-6
    disable(base)
    assert base.config._attn_implementation == "eager"
    assert error(logits(base), alone) < 3e-6


@EVERY_MODEL
@pytest.mark.parametrize("order", ["hooks first", "enable first"])
@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_offloaded_weights(make: Callable[[], Any], order: str, kind: str, tmp_path: Path) -> None:
    def offload(model: Any) -> None:
        if kind == "cpu":
            accelerate.cpu_offload(model, torch.device("cpu"))
        else:
            accelerate.disk_offload(model, str(tmp_path), torch.device("cpu"))

    model = make()
    model.set_attn_implementation("eager")
    expected = logits(copy.deepcopy(model))
    for step in (offload, enable) if order == "hooks first" else (enable, offload):
        step(model)
    assert error(logits(model), expected) < 5e-6
    disable(model)
    assert error(logits(model), expected) < 5e-6


@ONE_INDEXER
def test_four_bit_weights(make: Callable[[], Any]) -> None:
    """Also of `kv_b_proj`, whose product with the identity is its decoded weight."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="see make test-training")
    model = make()
    for layer in model.model.layers:
        own = layer.self_attn.kv_b_proj
        coded = bitsandbytes.nn.Linear4bit(
            own.in_features, own.out_features, bias=False, compute_dtype=torch.float32
        )
        coded.load_state_dict(own.state_dict())
        layer.self_attn.kv_b_proj = coded.to("cpu")
    model.set_attn_implementation("eager")
    expected = logits(model)
    assert error(logits(enable(model)), expected) < 1e-5


@ONE_INDEXER
def test_a_projection_that_fsdp_shards_by_itself(make: Callable[[], Any]) -> None:
    def gradient(model: Any) -> Tensor:
        torch.manual_seed(8)
        model(input_ids=torch.randint(1, 96, (2, 24))).logits.square().mean().backward()
        grad = model.model.layers[0].self_attn.kv_b_proj.weight.grad
        found: Tensor = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        return found

    plain = make()
    plain.set_attn_implementation("eager")
    expected = gradient(plain)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        model = enable(make())
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            torch.distributed.fsdp.fully_shard(layer.self_attn.kv_b_proj, mesh=mesh)
        torch.distributed.fsdp.fully_shard(model, mesh=mesh)
        assert error(gradient(model), expected) < 1e-5
    finally:
        torch.distributed.destroy_process_group()
