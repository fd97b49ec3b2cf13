"""The check: finds missing synchronisation deterministically, by happens-before and proxies."""

from ptxemu.check.findings import Finding, Site

__all__ = ["Finding", "Site"]
