#!/usr/bin/env bash
# bench.sh: side-by-side figures, then 64 servers at once; nvitop-exporter gets a virtual environment of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
other=${KVWATCH_BENCH_VENV:-.venv/bench-nvitop}
if [ ! -x "$other/bin/nvitop-exporter" ]; then
    tools_python=$(.venv/bin/python -c 'import sys; print(sys._base_executable)')
    "$tools_python" -m venv "$other"
    "$other/bin/pip" install --quiet --disable-pip-version-check nvitop-exporter
fi
good=0
.venv/bin/python -m checks.bench --nvitop "$other" "$@" || good=1
.venv/bin/python -m checks.bench.many || good=1
exit $good
