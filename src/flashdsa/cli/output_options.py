"""Options of several commands. A path that cannot be written ends a command at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from flashdsa.output_paths import require_creatable, require_creatable_folder
from flashdsa.settings import BACKENDS

PICTURES = (".png", ".svg", ".pdf")


def backend_option(
    default: str, text: str, names: tuple[str, ...] = BACKENDS[1:]
) -> Callable[[Any], Any]:
    """--backend, of those that a command can name."""
    return click.option(
        "--backend",
        type=click.Choice(names),
        metavar="NAME",
        default=default,
        show_default=True,
        help=f"{text} One of {', '.join(names)}.",
    )


class _Output(click.Path):
    """A path that is tried when the command line is read."""

    def __init__(self, **how: Any) -> None:
        super().__init__(path_type=Path, **how)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path.

        Raises:
            ArgumentValueError: nothing can be written there; names the option.
        """
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if ctx is None or not ctx.resilient_parsing:
            self.require(param.opts[0] if param is not None else "path", path)
        return path

    def require(self, name: str, path: Path) -> None:
        """Raise unless files can be written at `path`."""
        raise NotImplementedError


class OutputFile(_Output):
    """A file whose name ends in one of `suffixes`; none: any."""

    def __init__(self, *suffixes: str) -> None:
        super().__init__()
        self._suffixes = suffixes

    def require(self, name: str, path: Path) -> None:
        """Raise unless the file can be written and has one of the suffixes."""
        require_creatable(name, path, self._suffixes)


class OutputFolder(_Output):
    """A folder, which need not be there."""

    def require(self, name: str, path: Path) -> None:
        """Raise unless the folder can be made or written to."""
        require_creatable_folder(name, path)


class JsonOrFolder(_Output):
    """A .json file, or a folder for one."""

    def require(self, name: str, path: Path) -> None:
        """Raise unless the file or the folder can be written."""
        if path.suffix == ".json":
            require_creatable(name, path)
        else:
            require_creatable_folder(name, path)
