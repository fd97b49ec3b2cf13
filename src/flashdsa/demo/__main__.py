"""`python -m flashdsa.demo`: the same as `flashdsa demo`, for launchers such as torchrun."""

import sys

from flashdsa.cli.main import cli

if __name__ == "__main__":
    cli(["demo", *sys.argv[1:]], prog_name="flashdsa")
