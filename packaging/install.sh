#!/bin/sh
# Installs kvwatch as a service, or takes it away again.
#
#   packaging/install.sh install   [--root DIR] [--no-start]
#   packaging/install.sh uninstall [--root DIR] [--purge]
#
# install    makes a virtual environment in /opt/kvwatch, links /usr/local/bin/kvwatch to it and calls `kvwatch
#            install-service`: units, users, /run/kvwatch, an example beside /etc/kvwatch/kvwatch.yml; starts it.
#            Running it again upgrades; your configuration is never touched. Without one kvwatch watches what it
#            finds when it starts; `kvwatch probe --write /etc/kvwatch/kvwatch.yml` writes that down.
# uninstall  undoes that. /etc/kvwatch, /var/lib/kvwatch and the user stay, unless --purge.
# --root     (or DESTDIR) builds a tree for a package or image: no user, no systemctl.
#
# PYTHON=/usr/bin/python3  the interpreter to use; it must not live under /home or /root, which the unit hides
# SOURCE=...               what pip installs instead of this checkout (a directory or a wheel)
# PIP_ARGS=...             further arguments for pip (an index, --no-index --find-links, ...)
set -eu

prefix=/opt/kvwatch
here=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
root=${DESTDIR:-}
start=yes
purge=no

say() { printf '%s\n' "$*"; }
die() { printf 'install.sh: %s\n' "$*" >&2; exit 2; }

usage() { sed -n '2,20s/^# \{0,1\}//p' "$0"; }

find_python() {
    for python in ${PYTHON:-/usr/bin/python3.14 /usr/bin/python3.13 /usr/bin/python3.12 /usr/bin/python3.11 /usr/bin/python3 /usr/local/bin/python3}; do
        [ -x "$python" ] || continue
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        case $("$python" -c 'import os, sys; print(os.path.realpath(sys.executable))') in
            /home/*|/root/*) continue ;;
        esac
        say "$python"
        return
    done
    die "no Python 3.11 or newer outside /home and /root (the unit hides those); set PYTHON=/path/to/python3"
}

# Scripts that pip writes name the interpreter where it is built; the unit needs where it will be.
relocate() {
    [ -n "$root" ] || return 0
    grep -lI "$root$prefix" "$root$prefix"/bin/* "$root$prefix/pyvenv.cfg" 2>/dev/null | while read -r file; do
        [ -L "$file" ] || sed -i "s|$root$prefix|$prefix|g" "$file"
    done
}

make_venv() {
    say "virtual environment: $root$prefix ($python)"
    "$python" -m venv "$root$prefix" || die "$python cannot make a virtual environment; on Debian: apt install python3-venv"
    # pip builds inside the folder it is given; a copy keeps the checkout clean and old builds out.
    copy=$(mktemp -d)
    trap 'rm -rf "$copy"' EXIT
    for name in kvwatch pyproject.toml README.md LICENSE; do
        [ ! -e "$here/$name" ] || cp -R "$here/$name" "$copy/"
    done
    # shellcheck disable=SC2086
    "$root$prefix/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade ${PIP_ARGS:-} "${SOURCE:-$copy}"
    relocate
}

# Units, users and the example are `kvwatch install-service`'s business, with or without this script.
service() {
    PYTHONPATH="$here" PYTHONDONTWRITEBYTECODE=1 DESTDIR='' "$python" -P -m kvwatch install-service \
        --prefix "$prefix" ${root:+--root "$root"} "$@"
}

link() {
    mkdir -p "$root/usr/local/bin"
    ln -sfn "$prefix/bin/kvwatch" "$root/usr/local/bin/kvwatch"
    say "linked $root/usr/local/bin/kvwatch"
}

do_install() {
    python=$(find_python)
    [ "${KVWATCH_SKIP_VENV:-}" = 1 ] || make_venv
    link
    if [ "$start" = yes ]; then service; else service --no-start; fi
}

do_uninstall() {
    python=$(find_python)
    if [ "$purge" = yes ]; then service --uninstall --purge; else service --uninstall; fi
    rm -rf "$root$prefix"
    [ ! -L "$root/usr/local/bin/kvwatch" ] || rm -f "$root/usr/local/bin/kvwatch"
}

[ $# -ge 1 ] || { usage >&2; exit 2; }
command=$1
shift
while [ $# -gt 0 ]; do
    case $1 in
        -h|--help) usage; exit 0 ;;
        --root) [ $# -ge 2 ] || die "--root needs a directory"; root=$2; shift ;;
        --no-start) start=no ;;
        --purge) purge=yes ;;
        *) die "unknown option $1; see: packaging/install.sh --help" ;;
    esac
    shift
done
root=${root%/}
case $command in
    -h|--help) usage; exit 0 ;;
    install|uninstall) ;;
    *) die "unknown command $command; install or uninstall" ;;
esac
[ -n "$root" ] || [ "$(id -u)" = 0 ] || die "must be root; or give --root DIR"
"do_$command"
