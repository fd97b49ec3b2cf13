"""What every test needs before torch is imported, and one profile of hypothesis."""

import os

# Threads that wait must sleep: spinning ones slow the tests many times over where other work
# shares the cores. With a process for each core a process has one thread.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# What commands print is as wide as in a pipe, whatever the terminal of the tests is.
os.environ.pop("COLUMNS", None)

from hypothesis import settings

# The same examples on every machine, and no clock in a verdict.
settings.register_profile("ptxemu", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("ptxemu")
