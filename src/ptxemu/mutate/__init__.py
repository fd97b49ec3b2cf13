"""Mutation testing of synchronisation: remove or weaken one instruction, and see who notices."""

from ptxemu.mutate.mutations import Mutation, mutations_of
from ptxemu.mutate.replay import Replay
from ptxemu.mutate.report import Report
from ptxemu.mutate.runner import Outcome, Result, mutate
from ptxemu.mutate.sites import CATEGORIES, Site, find_sites

__all__ = [
    "CATEGORIES",
    "Mutation",
    "Outcome",
    "Replay",
    "Report",
    "Result",
    "Site",
    "find_sites",
    "mutate",
    "mutations_of",
]
