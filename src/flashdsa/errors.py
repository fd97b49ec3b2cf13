"""The error tree: every error that flashdsa raises on purpose is a FlashDsaError and a built-in."""

from __future__ import annotations


class FlashDsaError(Exception):
    """Root of all errors raised on purpose by flashdsa."""


class ArgumentTypeError(FlashDsaError, TypeError):
    """An argument has the wrong Python type or dtype."""


class ArgumentValueError(FlashDsaError, ValueError):
    """An argument has the wrong rank, shape, device, layout or value."""


class RankError(FlashDsaError, RuntimeError):
    """Another rank of a group died, or did not come in the group's timeout."""


class UnsupportedError(FlashDsaError, NotImplementedError):
    """No implementation serves the call; the message names the missing feature."""


class DoubleBackwardError(FlashDsaError, NotImplementedError):
    """A gradient of a gradient was asked for; mla_bwd has no derivative here."""
