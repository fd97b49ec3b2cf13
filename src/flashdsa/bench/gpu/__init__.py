"""Measuring on a GPU: timers, cases, peers, the judge of what is timed, result and chart."""
