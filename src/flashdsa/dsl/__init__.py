"""Vocabulary of the kernels: the only folder that knows CuTe DSL internals. Never imports torch."""
