"""transformers' own common tests over models that flashdsa serves: `make test-transformers`.

The source archive of the installed release has `tests/test_modeling_common.py`; the testers of
each model are ours, because the archive has none. `tools/transformers_tests.py` runs this file.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import types
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from flashdsa.integrations.transformers import enable
from tests.integrations.test_transformers_two_sources import COMMON, LAYERS
from tests.support.tiny_models import SMALL

ARCHIVE = Path(os.environ["FLASHDSA_TRANSFORMERS_ARCHIVE"])
INDEXER = os.environ.get("FLASHDSA_COMMON_INDEXER", "model")
"""`indexer` of `enable`, or "none": the tests without flashdsa."""


def load_common_tests() -> Any:
    """Import the archive's tests; what they import and the archive lacks is empty."""
    package = types.ModuleType("transformers_tests")
    package.__path__ = [str(ARCHIVE / "tests")]
    sys.modules["transformers_tests"] = package
    for module, mixin in (
        ("exporters.test_export", "ExportTesterMixin"),
        ("generation.test_utils", "GenerationTesterMixin"),
    ):
        parts = module.split(".")
        for depth in range(1, len(parts) + 1):
            name = "transformers_tests." + ".".join(parts[:depth])
            sys.modules.setdefault(name, types.ModuleType(name))
        setattr(sys.modules["transformers_tests." + module], mixin, type(mixin, (), {}))
    return importlib.import_module("transformers_tests.test_modeling_common")


COMMON_TESTS = load_common_tests()


@functools.cache
def enable_when_built() -> None:
    """Enable each model of a supported kind when the construction of the whole of it ends."""
    depth = 0

    def wrap(kind: type[PreTrainedModel]) -> None:
        own = kind.__init__

        @functools.wraps(own)
        def construct(self: Any, *arguments: Any, **named: Any) -> None:
            nonlocal depth
            depth += 1
            try:
                own(self, *arguments, **named)
            finally:
                depth -= 1
            if not depth:
                enable(self, indexer=INDEXER)

        kind.__init__ = construct

    for test in TESTS:
        for kind in test.all_model_classes:
            wrap(kind)


class Tester:
    """Make a tiny configuration and inputs, as the common tests ask for them."""

    batch_size, seq_length, is_training = 2, 12, True

    def __init__(self, parent: Any, make: Callable[[], Any]) -> None:
        self.parent, self.make = parent, make
        config = self.get_config()
        self.num_hidden_layers = config.num_hidden_layers
        self.hidden_size = config.hidden_size
        self.num_attention_heads = config.num_attention_heads
        self.vocab_size = config.vocab_size

    def get_config(self) -> Any:
        return self.make()

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        ids = torch.randint(3, self.vocab_size, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


# The embedding of a padding token is 0: its scores would all be equal, and ties broken otherwise.
NO_TIES: dict[str, Any] = {"pad_token_id": None}


def deepseek_v32() -> Any:
    changes = {"num_hidden_layers": 2, "index_topk": 4, **NO_TIES}
    return transformers.DeepseekV32Config(**SMALL | changes)


def glm_moe_dsa() -> Any:
    changes = {
        "num_hidden_layers": 2,
        "index_topk": 4,
        "indexer_types": ["full", "shared"],
        **NO_TIES,
    }
    return transformers.GlmMoeDsaConfig(**SMALL | changes)


def deepseek_v4() -> Any:
    return transformers.DeepseekV4Config(
        **COMMON | NO_TIES, head_dim=64, o_lora_rank=16, o_groups=2, index_topk=4, sliding_window=8,
        layer_types=LAYERS, compress_rates=dict(zip(LAYERS[1:], (4, 8), strict=True)),
    )  # fmt: skip


def glm5_next() -> Any:
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig

    sizes = COMMON | NO_TIES | {"num_hidden_layers": 2}
    return Glm5NextTextConfig(
        **sizes, intermediate_size=64, num_key_value_heads=4, kv_lora_rank=32, qk_rope_head_dim=0,
        qk_nope_head_dim=24, v_head_dim=20, n_group=1, topk_group=1, index_topk=8, index_kpool=4,
        layer_types=["deepseek_sparse_attention"] * 2, indexer_types=["full", "shared"],
    )  # fmt: skip


class CommonTests(COMMON_TESTS.ModelTesterMixin):  # type: ignore[misc, name-defined]
    """The common tests of one kind of model."""

    make: Callable[[], Any]
    test_all_params_have_gradient = False  # experts that no token chose; the indexer has none

    def setUp(self) -> None:
        self.model_tester = Tester(self, type(self).make)
        torch.manual_seed(0)


class DeepseekV32Test(CommonTests, unittest.TestCase):
    make = staticmethod(deepseek_v32)
    all_model_classes = (transformers.DeepseekV32Model, transformers.DeepseekV32ForCausalLM)


class GlmMoeDsaTest(CommonTests, unittest.TestCase):
    make = staticmethod(glm_moe_dsa)
    all_model_classes = (transformers.GlmMoeDsaModel, transformers.GlmMoeDsaForCausalLM)


class DeepseekV4Test(CommonTests, unittest.TestCase):
    make = staticmethod(deepseek_v4)
    all_model_classes = (transformers.DeepseekV4Model, transformers.DeepseekV4ForCausalLM)


class Glm5NextTest(CommonTests, unittest.TestCase):
    make = staticmethod(glm5_next)
    all_model_classes = (transformers.Glm5NextTextModel,)


TESTS = (DeepseekV32Test, GlmMoeDsaTest, DeepseekV4Test, Glm5NextTest)
if INDEXER != "none":
    enable_when_built()
