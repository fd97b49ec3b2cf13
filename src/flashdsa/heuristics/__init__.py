"""Measured constants by which kernels are chosen: one file a family of GPUs, read by every choice.

`python -m workbench ways OPERATION` times every way of drawn calls and judges the choice by it.
"""
