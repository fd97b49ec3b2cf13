#!/usr/bin/env bash
# TRL, PEFT and accelerate over enabled models: tools/test_training.sh VENV FOLDER. Installs them into an
# environment of their own in FOLDER (300 MB), beside what VENV has.
set -euo pipefail
venv=$(realpath "$1")
mkdir -p "$2"
folder=$(realpath "$2")
wanted=(trl==1.16.0 peft==0.21.2 accelerate==1.15.0 datasets==5.2.0 pyarrow==24.0.0 pandas dill==0.4.1
    multiprocess==0.70.19 xxhash tzdata bitsandbytes==0.50.2)
if [ "$(cat "$folder/.ready" 2>/dev/null)" != "${wanted[*]}" ]; then
    "$venv/bin/python" -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet --no-deps "${wanted[@]}"
    "$venv/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
        > "$("$folder/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/project.pth"
    echo "${wanted[*]}" > "$folder/.ready"
fi
"$folder/bin/python" -m pytest -m slow -p no:xdist tests/integrations/test_training_stack.py
