"""Does a scrape get through a flood? `python -m checks.endurance.flood` (`make flood`).

A real `kvwatch run --demo`, first plain, then with TLS. Against it: 1,000 idle connections, 200 that
drip a byte a second, some that send a header of 10 MB; then TLS handshakes that never finish. Each that
is closed comes back. Meanwhile well-behaved scrapers ask ten times a second: one with a new connection each
time, one that keeps its own, and one whose request takes 0.2 s to send. Prints figures; 1 when a bound fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from checks.endurance.process import MIB, Usage, cpu_s, die_with_parent, quantile, usage, waited_for_cpu_s
from checks.endurance.program import ROOT, Kvwatch
from checks.endurance.scrape import Scraper

P99_S = 0.1
GROWTH_BYTES = 20 * MIB
EVERY_S = 0.1
SLOW_PIECE_S = 0.05
PLAIN = {"idle": 1000, "drip": 200, "header": 4}
TLS = {"idle": 500, "hello": 300, "handshake": 200, "drip": 100}


@dataclass
class Tally:
    """What one well-behaved client has seen."""

    name: str
    took_s: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    reopened: int = 0


class Client:
    """Asks on its own thread until told to stop."""

    def __init__(self, name: str, scraper: Scraper, *, pause_s: float = 0.0) -> None:
        self.tally = Tally(name)
        self._scraper = scraper
        self._pause_s = pause_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name)

    def __enter__(self) -> Client:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._scraper.close()
        self.tally.reopened = self._scraper.reopened

    def _run(self) -> None:
        begun_s = time.monotonic()
        while not self._stop.wait(EVERY_S):
            try:
                answer = self._scraper.get(pause_s=self._pause_s)
            except OSError as error:
                self.tally.refused.append(f"{time.monotonic() - begun_s:.1f} s: {error}")
                continue
            self.tally.took_s.append(answer.took_s)
            if answer.status != 200 or b"kvwatch_gpu_up" not in answer.body:
                self.tally.refused.append(f"{time.monotonic() - begun_s:.1f} s: status {answer.status}")


@contextlib.contextmanager
def attack(port: int, kinds: dict[str, int]) -> Iterator[dict[str, object]]:
    """The attackers in a process of their own; what they tell at the end is in the dict afterwards."""
    words = [f"{kind}={count}" for kind, count in kinds.items()]
    command = [sys.executable, "-m", "checks.endurance.attackers", str(port), *words]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=die_with_parent
    ) as crowd:
        told: dict[str, object] = {}
        try:
            yield told
        finally:
            out, _ = crowd.communicate(timeout=30)
            told.update(json.loads(out or b"{}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Flood:
    """One flood: what comes, for how long, and whether slow answers are a failure."""

    name: str
    kinds: dict[str, int]
    seconds: float
    timed: bool = True


def flooded(flood: Flood, daemon: Kvwatch, tls: ssl.SSLContext | None = None) -> bool:
    """Whether every bound held."""
    pid, port = daemon.pid, daemon.port
    quiet = _calm(port, pid, tls)
    cpu, waited, begun_s = cpu_s(pid), waited_for_cpu_s(pid), time.monotonic()
    clients = [
        Client("new connections", Scraper(port, tls=tls)),
        Client("a kept one", Scraper(port, tls=tls, keep=True)),
        Client("sent over 0.2 s", Scraper(port, tls=tls), pause_s=SLOW_PIECE_S),
    ]
    most = quiet
    with contextlib.ExitStack() as stack:
        for client in clients:
            stack.enter_context(client)
        told = stack.enter_context(attack(port, flood.kinds))
        while time.monotonic() < begun_s + flood.seconds:
            time.sleep(0.25)
            now = usage(pid, time.monotonic())
            most = now if now.pss > most.pss else most
    cpu, waited = cpu_s(pid) - cpu, waited_for_cpu_s(pid) - waited
    share = 100 * cpu / (time.monotonic() - begun_s)
    counts = ", ".join(f"{count} {kind}" for kind, count in flood.kinds.items())
    print(f"\n{flood.name}: {counts}; {flood.seconds:g} s")
    print(f"  connections made {told.get('opened')}, of these closed {told.get('closed')}")
    print(f"  kvwatch used {share:.0f} % of a core; its threads waited {waited:.2f} s for a processor")
    good = [_judge(client.tally, flood.timed) for client in clients]
    return all([*good, _memory(quiet, most)])


def _calm(port: int, pid: int, tls: ssl.SSLContext | None) -> Usage:
    """What kvwatch holds after a few scrapes of each kind, before the flood."""
    for keep in (False, True):
        calm = Scraper(port, tls=tls, keep=keep)
        for _ in range(10):
            calm.get()
            time.sleep(0.1)
        calm.close()
    return usage(pid, time.monotonic())


def _judge(tally: Tally, timed: bool) -> bool:
    p99_s = quantile(tally.took_s, 0.99)
    fast = p99_s <= P99_S or not timed
    holds = fast and not tally.refused and bool(tally.took_s)
    p50_ms, longest_ms = 1e3 * quantile(tally.took_s, 0.5), 1e3 * max(tally.took_s, default=0.0)
    print(
        f"  {tally.name:16} {len(tally.took_s):4} answers: p50 {p50_ms:.1f} ms, p99 {1e3 * p99_s:.1f} ms"
        f" (bound {1e3 * P99_S:.0f}), longest {longest_ms:.1f} ms; {len(tally.refused)} refused (bound 0),"
        f" {tally.reopened} closed between two requests{'' if holds else '  DOES NOT HOLD'}"
    )
    for line in tally.refused[:5]:
        print(f"    refused after {line}")
    return holds


def _memory(quiet: Usage, most: Usage) -> bool:
    grown = most.pss - quiet.pss
    holds = grown <= GROWTH_BYTES
    print(
        f"  PSS {quiet.pss / MIB:.1f} MiB before, {most.pss / MIB:.1f} MiB at the most:"
        f" {grown / MIB:+.1f} MiB (bound {GROWTH_BYTES / MIB:.0f}), {most.descriptors} descriptors"
        f"{'' if holds else '  DOES NOT HOLD'}"
    )
    return holds


def plain_flood(folder: Path, flood: Flood) -> bool:
    """Over plain HTTP."""
    with Kvwatch(folder, "--demo", "calm") as daemon:
        daemon.wait()
        return flooded(flood, daemon)


def tls_flood(folder: Path, flood: Flood) -> bool:
    """Over TLS, with a certificate made for it."""
    from tests.exporters.certs import Authority

    folder.mkdir(parents=True, exist_ok=True)
    authority = Authority(folder)
    pair = authority.sign("localhost")
    web = folder / "web.yml"
    web.write_text(f"tls_server_config: {{cert_file: {pair.cert}, key_file: {pair.key}}}\n")
    context = ssl.create_default_context(cafile=str(authority.cert))
    context.check_hostname = False  # an address, no name
    with Kvwatch(folder, "--demo", "calm", "--web.config.file", str(web)) as daemon:
        daemon.wait(context)
        return flooded(flood, daemon, context)


def main() -> int:
    """0 when every bound held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=35, help="of each of the two (at most 40)")
    args = parser.parse_args()
    seconds = min(args.seconds, 40.0)
    with tempfile.TemporaryDirectory(prefix="kvwatch-flood-") as name:
        good = plain_flood(Path(name) / "plain", Flood(name="plain", kinds=PLAIN, seconds=seconds))
        good &= tls_flood(Path(name) / "tls", Flood(name="TLS", kinds=TLS, seconds=seconds))
    print("\nevery bound held" if good else "\nA BOUND DOES NOT HOLD")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
