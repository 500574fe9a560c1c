"""Does any limit outlive a daemon that is killed? `python checks/act/sigkill.py 200`.

One daemon limits three servers, each by another lever: a program whose limit is a file, a web hook,
a lease. Each round crosses, waits a random moment, kills the daemon (SIGKILL) and then either starts
it again or runs `kvwatch restore`. Afterwards no lever may hold a limit. A lost round fails at once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from tests.daemon.acting import HttpLever, exec_lever  # noqa: E402
from tests.daemon.page_server import PageServer  # noqa: E402
from tests.harness import Daemon  # noqa: E402

NAMES = ("by-exec", "by-http", "by-lease")
LONGEST_WAIT_S = 1.4
SLOW_HOOK = '[ "$KVWATCH_EVENT" = restore ] || sleep 0.$(od -An -N1 -tu1 /dev/urandom | tr -d " ")'


class Round:
    """Levers, page and daemon; looks for limits that are left."""

    def __init__(self, folder: Path, server: PageServer, http: HttpLever) -> None:
        self.folder, self.server, self.http = folder, server, http
        self.lever, via = exec_lever(folder, SLOW_HOOK)
        self.lease = folder / "d/run/limits/by-lease.json"
        text = "tick: 200ms\ngpus: {source: none}\nservers:\n"
        for name in NAMES:
            text += f'  - {{name: {name}, kind: vllm, url: "{server.url}", period: 200ms, timeout: 150ms}}\n'
        text += "control:\n  mode: act\n  targets:\n"
        for name, lever in zip(NAMES, (via, http.via, "[{lease: {}}]"), strict=True):
            text += (
                f"    - {{server: {name}, policy: threshold, accept_goodput_loss: true, floor: 4,"
                f" ceiling: 64, lease: 6s, cooldown: 300ms, via: {lever}}}\n"
            )
        self.daemon = Daemon(folder / "d", text)

    def limits(self) -> list[str]:
        """What is in force now."""
        found = []
        if self.lever.exists():
            found.append(f"exec: {self.lever.read_text().strip()}")
        if self.http.limit is not None:
            found.append(f"http: {self.http.limit}")
        if self.lease.exists():
            found.append(f"lease: {self.lease.read_text().strip()}")
        return found

    def noted(self) -> bool:
        """Whether anything is still to be given back."""
        path = self.folder / "d/state/outstanding.json"
        return path.exists() and bool(json.loads(path.read_text())["entries"])

    def kill(self, wait_s: float) -> list[str]:
        """Cross, wait, kill; what was in force at that moment."""
        pages = self.server.pages
        while self.server.pages < pages + 7:
            time.sleep(0.02)
        self.server.full(running=random.randint(10, 60))
        time.sleep(wait_s)
        self.daemon.signal(signal.SIGKILL)
        assert self.daemon.process is not None
        self.daemon.process.wait()
        held = self.limits()
        self.server.calm()
        return held

    def restore(self) -> None:
        """The command, as ExecStopPost runs it."""
        environment = os.environ | {
            "RUNTIME_DIRECTORY": str(self.folder / "d/run"),
            "STATE_DIRECTORY": str(self.folder / "d/state"),
        }
        command = [sys.executable, "-m", "kvwatch", "restore"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"kvwatch restore: {done.returncode}\n{done.stderr}")

    def check(self, what: str, *, at_once: bool) -> None:
        """Nothing is left, and nothing comes back."""
        # The daemon answers before it has given back: a hook of the dead one may have to end first.
        end_s = time.monotonic() + (0.0 if at_once else 10.0)
        while (self.noted() or self.limits()) and time.monotonic() < end_s:
            time.sleep(0.02)
        if self.noted():
            raise SystemExit(f"STILL NOTED after {what}\n{self.daemon.log.read_text()[-3000:]}")
        for _ in range(10):
            left = self.limits()
            if left:
                raise SystemExit(f"LEFT after {what}: {left}\n{self.daemon.log.read_text()[-3000:]}")
            time.sleep(0.1)


def main() -> int:
    """0 when no limit was left in any round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", nargs="?", type=int, default=200, help="rounds (default 200)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    args = parser.parse_args()
    random.seed(args.seed)
    held = 0
    with tempfile.TemporaryDirectory(prefix="kvwatch-sigkill-") as folder, PageServer() as server:
        with HttpLever() as http:
            round_ = Round(Path(folder), server, http)
            with round_.daemon:
                for number in range(args.count):
                    wait_s = random.uniform(0.0, LONGEST_WAIT_S)
                    held += bool(round_.kill(wait_s))
                    if number % 2:
                        round_.restore()
                        round_.check(f"kvwatch restore (round {number}, seed {args.seed})", at_once=True)
                    round_.daemon.start()
                    round_.check(f"a restart (round {number}, seed {args.seed})", at_once=False)
                    if sys.stdout.isatty():
                        print(f"\r{number + 1}/{args.count}", end="", flush=True)
    print(f"{args.count} kills, {held} of them with a limit in force; none was left (seed {args.seed})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
