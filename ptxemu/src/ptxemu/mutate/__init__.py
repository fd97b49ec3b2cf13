"""Mutation testing of synchronisation: remove or weaken one instruction, and see who notices."""

from ptxemu.mutate.equivalents import Equivalents
from ptxemu.mutate.replay import Outcome, Replay, fingerprint
from ptxemu.mutate.report import Report
from ptxemu.mutate.runner import Result, Trial, measure, mutate
from ptxemu.mutate.sites import CATEGORIES, Mutation, Site, find_sites, mutations_of

__all__ = [
    "CATEGORIES",
    "Equivalents",
    "Mutation",
    "Outcome",
    "Replay",
    "Report",
    "Result",
    "Site",
    "Trial",
    "find_sites",
    "fingerprint",
    "measure",
    "mutate",
    "mutations_of",
]
