"""An example: a small byte model with DeepSeek Sparse Attention learns Python's own text."""

from flashdsa.demo.run import run_demo
from flashdsa.demo.train import DemoOptions

__all__ = ["DemoOptions", "run_demo"]
