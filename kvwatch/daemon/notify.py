"""The sd_notify protocol: datagrams to the socket that systemd names."""

from __future__ import annotations

import os
import socket
import time


class Notifier:
    """Tells systemd READY, STATUS, RELOADING, STOPPING and WATCHDOG; silent where there is no systemd."""

    def __init__(self) -> None:
        self._address = os.environ.get("NOTIFY_SOCKET", "")
        watchdog_us = int(os.environ.get("WATCHDOG_USEC", "0") or 0)
        self.watchdog_s = watchdog_us / 1e6 or None
        self._beaten_s = 0.0

    def send(self, *lines: str) -> None:
        """Send one message; a failure is ignored, since systemd's own timeouts then speak."""
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                channel.setblocking(False)
                channel.sendto("\n".join(lines).encode(), address)
        except OSError:  # no descriptor left, or nobody listens
            return

    def ready(self, status: str) -> None:
        """Start-up (or a reload) is complete."""
        self.send("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """A reload begins; newer systemd wants the monotonic stamp."""
        self.send("RELOADING=1", f"MONOTONIC_USEC={int(time.monotonic() * 1e6)}")

    def beat(self, now_s: float) -> None:
        """Feed the watchdog, at most four times in its interval. Called by the loop alone."""
        if self.watchdog_s is not None and now_s - self._beaten_s >= self.watchdog_s / 4:
            self._beaten_s = now_s
            self.send("WATCHDOG=1")
