#!/usr/bin/env bash
# Writes constraints.txt from what a virtual environment holds: tools/pin_constraints.sh DIRECTORY.
set -euo pipefail
{
    echo "# The one place where versions are pinned: what make installs and CI tests, on Python 3.11 and 3.12."
    echo "# Regenerate with 'make constraints' after changing a dependency in pyproject.toml."
    "$1/bin/python" -m pip list --format=freeze | grep -vE '^(pip|setuptools|flashdsa)==' | sed 's/+cpu$//'
} > constraints.txt.new
mv constraints.txt.new constraints.txt
