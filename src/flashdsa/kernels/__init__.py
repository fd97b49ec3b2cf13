"""Kernels in CuTe DSL: one folder is one operator, inside it one folder per architecture."""
