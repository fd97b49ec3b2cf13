#!/usr/bin/env bash
# The contracts of Megatron-Core, vLLM, SGLang, VeOmni and flashinfer-bench, against these packages' own files:
# tools/test_integrations.sh VENV FOLDER. Downloads some 400 MB into FOLDER once; nothing of theirs is
# installed into VENV.
set -euo pipefail
venv=$(realpath "$1")
mkdir -p "$2"
folder=$(realpath "$2")
download() { # folder to unpack into, wheel pattern, requirement, what to unpack
    local into=$1 pattern=$2 requirement=$3
    shift 3
    compgen -G "$folder/wheels/$pattern" > /dev/null || "$venv/bin/python" -m pip download --quiet --no-deps \
        --only-binary=:all: --python-version 3.12 --dest "$folder/wheels" "$requirement"
    "$venv/bin/python" - "$folder" "$into" "$pattern" "$@" <<'PYTHON'
import sys, zipfile
from fnmatch import fnmatch
from pathlib import Path

folder, into, pattern, *wanted = sys.argv[1:]
(wheel,) = Path(folder, "wheels").glob(pattern)
with zipfile.ZipFile(wheel) as archive:
    names = [name for name in archive.namelist() if any(fnmatch(name, one) for one in wanted)]
    archive.extractall(Path(folder, into), names)
PYTHON
}
download files "vllm-0.33*" "vllm==0.33.*" "vllm/v1/attention/*.py" "vllm/model_executor/layers/*.py" "vllm/models/deepseek_v32/*.py"
for version in 0.5.13 0.5.23; do
    download "files/sglang-$version" "sglang-$version-*" "sglang==$version" "sglang/srt/layers/attention/*.py" \
        "sglang/srt/plugins/*.py" "sglang/srt/mem_cache/memory_pool.py" "sglang/srt/server_args.py" "sglang/srt/arg_groups/*.py"
done
download files "megatron_core-0.19.2*" "megatron-core==0.19.2" "megatron/*.py"
download files "veomni-0.1.12*" "veomni==0.1.12" "veomni/ops/kernels/deepseek_sparse_attention/*.py" \
    "veomni/models/transformers/glm_moe_dsa/generated/*.py"
download files "flashinfer_bench-0.1.2*" "flashinfer-bench==0.1.2" "flashinfer_bench/*.py"
if [ ! -e "$folder/venv/.ready" ]; then # what these files import, beside what VENV has
    "$venv/bin/python" -m venv "$folder/venv"
    "$folder/venv/bin/python" -m pip install --quiet --no-deps \
        --constraint constraints.txt triton docstring-parser
    "$venv/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
        > "$("$folder/venv/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/project.pth"
    touch "$folder/venv/.ready"
fi
FLASHDSA_PEERS=$folder/files PYTHONPATH=src:$folder/files "$folder/venv/bin/python" -m pytest -m slow -p no:xdist \
    tests/integrations/test_contracts.py
