#!/usr/bin/env bash
# tools.sh: bring the system tools that the tests use. As root through apt; otherwise say what is missing.
set -euo pipefail

# tool:package
wanted=(
    promtool:prometheus prometheus:prometheus prometheus-alertmanager:prometheus-alertmanager
    amtool:prometheus-alertmanager gcc:gcc systemd-nspawn:systemd-container
    systemd-analyze:systemd dbus-daemon:dbus haproxy:haproxy openssl:openssl strace:strace
    chromium:chromium unshare:util-linux nsenter:util-linux mount:mount
)
packages=()
for pair in "${wanted[@]}"; do
    command -v "${pair%%:*}" >/dev/null || packages+=("${pair#*:}")
done
[ -e /usr/include/stdio.h ] || packages+=(libc6-dev)
[ ${#packages[@]} -gt 0 ] || exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "tests that need these will be skipped and counted: ${packages[*]}" >&2
    exit 0
fi

# The tests start what they need themselves: apt must not start services on this machine.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod 755 $policy
    trap 'rm -f $policy' EXIT
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
