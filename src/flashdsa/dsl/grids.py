"""Launches of a stream that follow each other early."""

from cutlass import cute


def follow_grid() -> None:
    """All threads, before they read or write device memory: wait for the stream's launches before
    this one, and let the next one take SMs that are free.

    A kernel that is launched with `use_pdl=True` calls it: it may have begun while the launch
    before it runs. That saves half a microsecond where both are short; kernels of many CTAs that
    wait may delay those that do not. CTAs that stay must fill an SM: where it has room for more of
    them than are meant for it, those that come first crowd on the SMs that are free first.
    """
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
