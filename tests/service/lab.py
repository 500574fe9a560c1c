"""A real systemd in a container over an overlay of this machine's root: what a unit says is then enforced.

The overlay lives in a tmpfs and goes away with the lab; nothing of the machine is changed. Device policy
is enforced by BPF programs, for which the container gets CAP_BPF; without them it would pass silently and
a test would prove nothing. Memory and CPU limits are *not* enforced where controllers sit on cgroup v1.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import time
from pathlib import Path
from types import TracebackType

REPOSITORY = Path(__file__).parents[2]
PYTHON = "/usr/bin/python3"  # the unit hides /home and /root, where a developer's Python may live
BOOT_S = 60.0
LIBRARIES = ("yaml", "prometheus_client", "pynvml.py")
NSPAWN = (
    "systemd-nspawn",
    "--quiet",
    "--register=no",
    "--keep-unit",
    "--private-network",
    "--link-journal=no",
    "--system-call-filter=bpf",
    "--capability=CAP_BPF,CAP_NET_ADMIN",
    "--boot",
    "--console=pipe",
)
LAUNCHER = """#!/opt/kvwatch/bin/python
import sys
from kvwatch.cli import main
sys.exit(main())
"""


class Lab:
    """A booted container; `run` executes a command in it as root."""

    def __init__(self) -> None:
        self._base = Path(tempfile.mkdtemp(prefix="kvwatch-systemd-"))
        self.root = self._base / "root"
        self._mounted: list[Path] = []
        self._container: subprocess.Popen[bytes] | None = None
        self._leader = 0
        self._cursor = ""

    def __enter__(self) -> Lab:
        try:
            self._mount()
            self._furnish()
            self._boot()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self, *command: str, check: bool = False, timeout: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside; standard error joins standard output."""
        enter = ["nsenter", "-t", str(self._leader), "-m", "-u", "-i", "-n", "-p", "-C", "-r", "-w"]
        done = subprocess.run(
            [*enter, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}")
        return done

    def show(self, unit: str = "kvwatch", *properties: str) -> dict[str, str]:
        """Properties of a unit."""
        asked = ",".join(properties)
        lines = self.run("systemctl", "show", unit, f"--property={asked}", check=True).stdout.splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def wait(self, what: str, timeout: float, **expected: str) -> dict[str, str]:
        """Wait until the unit's properties have these values; fails with what they are."""
        deadline_s = time.monotonic() + timeout
        while True:
            found = self.show("kvwatch", *expected)
            if all(found.get(key) == value for key, value in expected.items()):
                return found
            if time.monotonic() > deadline_s:
                raise AssertionError(f"{what}: expected {expected}, found {found}\n{self.journal()}")
            time.sleep(0.1)

    def journal(self, unit: str = "kvwatch") -> str:
        """The unit's journal since the last `reset`."""
        since = (f"--after-cursor={self._cursor}",) if self._cursor else ()
        return self.run("journalctl", "-u", unit, "--no-pager", "-o", "cat", *since).stdout

    def get(self, path: str, port: int = 9843) -> tuple[int, str]:
        """GET from the daemon inside; (0, reason) when it does not answer."""
        code = f"""
import urllib.error, urllib.request
try:
    with urllib.request.urlopen("http://127.0.0.1:{port}{path}", timeout=5) as answer:
        print(answer.status, answer.read().decode(), sep="\\n")
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode(), sep="\\n")
except OSError as error:
    print(0, error, sep="\\n")
"""
        status, _, body = self.run(PYTHON, "-c", code).stdout.partition("\n")
        return int(status), body

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file inside."""
        target = self.root / path.lstrip("/")
        # /run and /tmp are mounts of the container's own: those files are written from inside.
        if path.startswith(("/run/", "/tmp/")):
            raise ValueError(f"{path} is on a mount of the container")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(mode)

    def install(self) -> str:
        """`make install` in a checkout; the virtual environment is in place already (no network in here)."""
        make = ("make", "-C", "/opt/kvwatch-source", "--no-print-directory")
        return self.run(*make, "install", "KVWATCH_SKIP_VENV=1", check=True).stdout

    def drop_in(self, name: str, text: str) -> None:
        """Add a drop-in to the unit and load it."""
        self.write(f"/etc/systemd/system/kvwatch.service.d/{name}.conf", text)
        self.run("systemctl", "daemon-reload", check=True)

    def reset(self) -> None:
        """Stop the service and forget drop-ins and failures."""
        self.run("systemctl", "stop", "kvwatch")
        for unit in ("kvwatch.service", "kvwatch-exec@.service"):
            shutil.rmtree(self.root / f"etc/systemd/system/{unit}.d", ignore_errors=True)
        self.run("systemctl", "daemon-reload", check=True)
        self.run("systemctl", "reset-failed", "kvwatch")
        self.run("journalctl", "--sync")
        said = self.run("journalctl", "-n", "0", "--show-cursor")
        self._cursor = said.stdout.rpartition("-- cursor: ")[2].strip()

    def _mount(self) -> None:
        tmpfs = self._base
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2g", "kvwatch-lab", str(tmpfs)], check=True)
        self._mounted.append(tmpfs)
        for name in ("upper", "work", "root"):
            (self._base / name).mkdir()
        layers = f"lowerdir=/,upperdir={tmpfs / 'upper'},workdir={tmpfs / 'work'}"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, str(self.root)], check=True)
        self._mounted.append(self.root)

    def _furnish(self) -> None:
        """Nothing of the machine starts; kvwatch is in a virtual environment, its checkout beside it."""
        system = self.root / "etc/systemd/system"
        for wanted in system.glob("*.wants"):
            shutil.rmtree(wanted)
        (self.root / "usr/sbin/policy-rc.d").unlink(missing_ok=True)
        (self.root / "etc/machine-id").write_text("")
        shutil.rmtree(self.root / "opt/kvwatch", ignore_errors=True)
        venv = self.root / "opt/kvwatch"
        subprocess.run([PYTHON, "-m", "venv", "--without-pip", str(venv)], check=True)
        (library,) = venv.glob("lib/python3*/site-packages")
        site = Path(sysconfig.get_path("purelib"))
        for name in LIBRARIES:
            self._copy(site / name, library / name)
        self._copy(REPOSITORY / "kvwatch", library / "kvwatch")
        self.write("/opt/kvwatch/bin/kvwatch", LAUNCHER, 0o755)
        for name in ("kvwatch", "systemd", "packaging", "Makefile"):
            self._copy(REPOSITORY / name, self.root / "opt/kvwatch-source" / name)

    def _copy(self, source: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "tests"))
        else:
            shutil.copy2(source, target)

    def _boot(self) -> None:
        with (self._base / "console.log").open("wb") as log:
            self._container = subprocess.Popen(
                [*NSPAWN, f"--directory={self.root}", f"--machine=kvwatch-{os.getpid()}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
                start_new_session=True,
            )
        deadline_s = time.monotonic() + BOOT_S
        while time.monotonic() < deadline_s:
            if self._find_leader():
                state = self.run("systemctl", "is-system-running").stdout.strip()
                if state in ("running", "degraded"):
                    return
            if self._container.poll() is not None:
                break
            time.sleep(0.1)
        raise RuntimeError(
            f"systemd did not boot:\n{(self._base / 'console.log').read_text(errors='replace')}"
        )

    def _find_leader(self) -> bool:
        """The container's init is the only child of systemd-nspawn."""
        if self._container is None:
            return False
        pid = self._container.pid
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return False
        self._leader = int(children[0]) if children else 0
        return bool(self._leader)

    def power_off(self) -> None:
        """Shut the container down; its files stay until `close`."""
        if self._container is None or self._container.poll() is not None:
            return
        if self._find_leader():
            os.kill(self._leader, signal.SIGRTMIN + 4)  # systemd: power off
        try:
            self._container.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._container.kill()
            self._container.wait()

    def close(self) -> None:
        """Power off, then take the mounts away."""
        self.power_off()
        for mounted in reversed(self._mounted):
            subprocess.run(["umount", str(mounted)], check=False)
        self._mounted.clear()
        shutil.rmtree(self._base, ignore_errors=True)
