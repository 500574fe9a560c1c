#!/usr/bin/env bash
# venv.sh DIR [dev]: make a virtual environment and install kvwatch into it (with the development tools).
set -euo pipefail
cd "$(dirname "$0")/.."
dir=$1
extra=${2:-}

python=
for candidate in "${PYTHON:-}" python3.14 python3.13 python3.12 python3.11 python3; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "kvwatch needs Python 3.11 or newer; set PYTHON=/path/to/python3" >&2
    exit 1
fi

echo "installing kvwatch${extra:+ and its development tools} into $dir (once; half a minute or more)" >&2

if [ ! -x "$dir/bin/pip" ]; then
    rm -rf "$dir"
    if ! "$python" -m venv "$dir" >/dev/null 2>&1; then
        # Debian ships the venv module without pip's bootstrap.
        rm -rf "$dir"
        if [ "$(id -u)" != 0 ]; then
            echo "cannot make a virtual environment; install it: sudo apt-get install python3-venv" >&2
            exit 1
        fi
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv >/dev/null
        "$python" -m venv "$dir"
    fi
fi
"$dir/bin/pip" install --quiet --disable-pip-version-check -e ".${extra:+[$extra]}"
