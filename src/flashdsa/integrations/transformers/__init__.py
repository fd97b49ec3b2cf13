"""Hugging Face transformers: attention of DeepSeek-V3.2 and GLM-5 by flashdsa.

from flashdsa.integrations.transformers import enable
model = enable(AutoModelForCausalLM.from_pretrained(...))
"""

from flashdsa.integrations.transformers.attention import NAME, dsa_attention, register
from flashdsa.integrations.transformers.models import disable, enable

__all__ = ["NAME", "disable", "dsa_attention", "enable", "register"]
