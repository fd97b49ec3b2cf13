"""The check: finds missing synchronisation deterministically, by happens-before and proxies."""

from ptxemu.check.checker import Checker
from ptxemu.check.findings import Finding, Site

__all__ = ["Checker", "Finding", "Site"]
