"""Launches, and how those of a stream follow each other early."""

from typing import Any

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


def launch_ctas(
    made: Any,
    ctas: Any,
    threads: Any,
    stream: Any,
    *,
    cluster: Any = None,
    sm_ctas: Any = None,
    carveout: Any = None,
    use_pdl: bool = False,
) -> None:
    """Launch a kernel's call on `stream`. `ctas`: of the grid, or (x, y). `threads`: of a CTA.
    `cluster`: CTAs of one. `sm_ctas`: that a streaming multiprocessor has registers for.
    `carveout`: percent of the first-level cache that may be shared memory. `use_pdl`: see
    `follow_grid`."""
    x, y = ctas if isinstance(ctas, tuple) else (ctas, 1)
    given = {
        "cluster": None if cluster is None else [cluster, 1, 1],
        "min_blocks_per_mp": sm_ctas,
        "preferred_smem_carveout": carveout,
    }
    options = {name: value for name, value in given.items() if value is not None}
    made.launch(grid=[x, y, 1], block=[threads, 1, 1], stream=stream, use_pdl=use_pdl, **options)


def launch_plan(
    made: Any, plan: Any, ctas: Any, stream: Any, *, cluster: Any = None, use_pdl: bool = True
) -> None:
    """Launch a kernel of roles, which takes a whole streaming multiprocessor; see `launch_ctas`."""
    launch_ctas(made, ctas, plan.threads, stream, cluster=cluster, sm_ctas=1, use_pdl=use_pdl)


def place_in_grid() -> tuple[Any, Any, Any]:
    """(number of this thread in its CTA, of its CTA in the grid, the grid's CTAs), along x."""
    return cute.arch.thread_idx()[0], cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
