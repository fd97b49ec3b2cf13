"""Measuring: the timing protocol, the cases, the machine, the result file and its chart."""
