"""Runs programs that were written for CUDA, with their own host code, on the emulator.

The host code runs natively. A stand-in for the CUDA runtime and driver (`standin/`, a shared
library in C that is compiled when it is first needed) answers its calls; what a launch does, and
every fact about the device, it asks this package for.
"""
