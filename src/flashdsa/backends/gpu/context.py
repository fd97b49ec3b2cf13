"""A thread's CUDA context: compiled functions launch by the driver, which has none for a new one.

CUDA's runtime, through which torch launches, makes a device's primary context the current one of a
thread with the thread's first call. The driver refuses a launch without a context (error 201).
"""

from __future__ import annotations

import ctypes
import threading


class _Thread(threading.local):
    """State of each thread: whether it is known to have a context."""

    has_context = False


THREAD = _Thread()


def make_current(device: int) -> None:
    """Make the device's primary context this thread's, unless it has one; once a thread."""
    THREAD.has_context = True
    context, handle = ctypes.c_void_p(), ctypes.c_int()
    # Errors and results of calls are ignored: a launch without a context reports the error.
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    driver.cuCtxGetCurrent(ctypes.byref(context))
    if context.value is None:
        driver.cuDeviceGet(ctypes.byref(handle), device)
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
        driver.cuCtxSetCurrent(context)
