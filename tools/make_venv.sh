#!/usr/bin/env bash
# Makes the virtual environment: tools/make_venv.sh DIRECTORY. PYTHON=... picks the interpreter.
set -euo pipefail
venv=$1

# The promise of pyproject.toml: minor versions of Python 3 from $oldest to before $above.
promise='^requires-python = ">=3\.([0-9]+),<3\.([0-9]+)"$'
if ! read -r oldest above < <(sed -nE "s/$promise/\1 \2/p" pyproject.toml); then
    echo "pyproject.toml: requires-python: expected '>=3.A,<3.B'" >&2
    exit 1
fi
newest=$((above - 1))

supported() {
    "$1" -c "import sys; sys.exit(not (3, $oldest) <= sys.version_info[:2] < (3, $above))" 2>/dev/null
}

python=
for candidate in ${PYTHON:-} python3 $(seq -f 'python3.%g' "$newest" -1 "$oldest"); do
    if command -v "$candidate" >/dev/null && supported "$candidate"; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "flashdsa needs Python 3.$oldest to 3.$newest; found $(python3 --version 2>&1 || echo none)." \
        "Set PYTHON=/path/to/python3.$newest and run make again." >&2
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
# One call for both: flashdsa's extra `emulate` takes ptxemu from the folder, as no index has it.
echo "Installing the pinned packages into $venv (a minute or two with packages cached)..."
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
    --constraint constraints.txt --editable ./ptxemu --editable '.[dev]'
# As pip would, but on all cores; some packages carry files of another Python.
"$venv/bin/python" -W ignore -m compileall -qq -j 0 "$venv/lib" || true
