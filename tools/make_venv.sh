#!/usr/bin/env bash
# Makes the virtual environment: tools/make_venv.sh DIRECTORY. PYTHON=... picks the interpreter.
set -euo pipefail
venv=$1

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; }

python=
for candidate in ${PYTHON:-} python3 python3.12 python3.11; do
    if command -v "$candidate" >/dev/null && supported "$candidate"; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "flashdsa needs Python 3.11 or 3.12; found $(python3 --version 2>&1 || echo none)." \
        "Set PYTHON=/path/to/python3.12 and run make again." >&2
    exit 1
fi

# Debian and Ubuntu ship venv in a package of its own.
if ! "$python" -c 'import ensurepip' 2>/dev/null; then
    package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq && apt-get install -y -qq "$package"
    else
        echo "$python cannot make virtual environments. Run: sudo apt-get install $package" >&2
        exit 1
    fi
fi

# An environment of another interpreter cannot be reused.
if [ -x "$venv/bin/python" ] && ! supported "$venv/bin/python"; then
    rm -rf "$venv"
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
echo "Installing the pinned packages into $venv (a minute or two with packages cached)..."
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
    --constraint constraints.txt --editable '.[dev]'
# As pip would, but on all cores; some packages carry files of another Python.
"$venv/bin/python" -m compileall -qq -j 0 "$venv/lib" || true
