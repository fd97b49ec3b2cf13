"""Asynchronous units, barriers and fences: the state behind the visible instructions."""
