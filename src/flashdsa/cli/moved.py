"""Commands that are no longer in the wheel: each says what replaced it."""

from __future__ import annotations

import click

from flashdsa.errors import UnsupportedError

MOVED = {
    "demo": "python -m examples.demo",
    "inspect": "python -m workbench inspect",
    "plan": "python -m workbench plan",
}
"""Name of the command -> what runs it in a checkout."""


def moved_commands() -> list[click.Command]:
    """Return a hidden command for each of `MOVED`, which ends with that line and exit code 2."""
    return [_moved(name, now) for name, now in MOVED.items()]


def _moved(name: str, now: str) -> click.Command:
    def run() -> None:
        raise UnsupportedError(
            f"{name}: moved out of the wheel; in a checkout of flashdsa run: {now}"
        )

    any_arguments = {"allow_extra_args": True, "ignore_unknown_options": True}
    return click.Command(
        name, callback=run, hidden=True, add_help_option=False, context_settings=any_arguments
    )
