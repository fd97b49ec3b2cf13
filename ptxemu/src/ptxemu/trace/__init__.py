"""The view of a run: timeline, counters and memory maps, made by observers of it."""

from ptxemu.trace.counters import Counters
from ptxemu.trace.memory_map import MemoryMap
from ptxemu.trace.recorder import Recorder, to_chrome

__all__ = ["Counters", "MemoryMap", "Recorder", "to_chrome"]
