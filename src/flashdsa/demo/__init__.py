"""The demo: a small byte model with DeepSeek Sparse Attention, trained on Python's own text."""

from flashdsa.demo.options import DemoOptions
from flashdsa.demo.result import DemoResult
from flashdsa.demo.run import run_demo

__all__ = ["DemoOptions", "DemoResult", "run_demo"]
