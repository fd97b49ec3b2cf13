"""Kernels in Triton, for GPUs that have no kernels of their own. Nothing here imports Triton.

Triton compiles an argument of 1 as a constant, and with it masks that are false for every thread.
No size or count of a caller may become one (tests/backends/test_triton_arguments.py): those that
change from call to call are in `do_not_specialize`, those of a model are annotated `tl.int32`, by
which Triton still learns that they are multiples of 16.
"""
