"""Vocabulary of the kernels: the only place that knows CuTe DSL internals. Never imports torch."""
