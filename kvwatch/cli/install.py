"""`kvwatch install-service`: the units, the service users and an example, in place or away again.

Needs the standard library only, so that `make install` can call it before anything is installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvwatch.cli import DEFAULT_CONFIG, EXIT_CANNOT_START, EXIT_OK, EXIT_USAGE

SHIPPED = Path(__file__).parents[1] / "service"
SHIPPED_BIN = "/opt/kvwatch/bin"  # as written in the units
HIDDEN = ("/home", "/root", "/run/user")  # ProtectHome= of the unit
EXAMPLE = f"{DEFAULT_CONFIG}.example"
SYSUSERS = "/usr/lib/sysusers.d/kvwatch.conf"
TMPFILES = "/usr/lib/tmpfiles.d/kvwatch.conf"
UNITS = ("kvwatch.service", "kvwatch-exec.socket", "kvwatch-exec@.service")
UNIT_FOLDER = "/etc/systemd/system"
FILES = {
    **{f"{UNIT_FOLDER}/{unit}": unit for unit in UNITS},
    SYSUSERS: "kvwatch.sysusers.conf",
    TMPFILES: "kvwatch.tmpfiles.conf",
    # An example only: a server that it names and that does not answer would page.
    EXAMPLE: "kvwatch.yml",
}
USERS = ("kvwatch", "kvwatch-exec")
KEPT = ("/etc/kvwatch", "/var/lib/kvwatch")
PURGED = (*KEPT, "/run/kvwatch", "/run/kvwatch-exec", *(f"{UNIT_FOLDER}/{unit}.d" for unit in UNITS))


class InstallError(Exception):
    """It cannot be done this way; the text says what to do instead."""


class Step(Protocol):
    """One thing to do, that can be said beforehand."""

    def describe(self) -> str:
        """One line that completes `would …`."""
        ...

    def do(self) -> None:
        """Do it. Raises OSError or InstallError."""
        ...


@dataclass(frozen=True, slots=True)
class Write:
    """Put a whole file in place, or leave the old one as it is."""

    path: Path
    text: str

    def describe(self) -> str:
        """Path, mode and size."""
        return f"write {self.path} (0644, {len(self.text.encode())} bytes)"

    def do(self) -> None:
        """A new file beside the old one takes its place."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        beside = self.path.with_name(f".{self.path.name}.new")
        try:
            beside.write_text(self.text, encoding="utf-8")
            beside.chmod(0o644)
            beside.replace(self.path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise


@dataclass(frozen=True, slots=True)
class Remove:
    """Take a file or a whole folder away, and the folders above that are empty then, up to `root`."""

    path: Path
    root: Path

    def describe(self) -> str:
        """Its path."""
        return f"remove {self.path}"

    def do(self) -> None:
        """What is not there is no error."""
        if self.path.is_dir() and not self.path.is_symlink():
            shutil.rmtree(self.path)
        else:
            self.path.unlink(missing_ok=True)
        for folder in self.path.parents:
            # On a running system those above belong to others; in a tree of ours they do not.
            if folder == self.root or self.root == Path("/") or not _is_empty(folder):
                return
            folder.rmdir()


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


@dataclass(frozen=True, slots=True)
class Run:
    """A command of the system; one that `may_fail` is not an error."""

    argv: tuple[str, ...]
    may_fail: bool = False

    def describe(self) -> str:
        """The command line."""
        return f"run {' '.join(self.argv)}"

    def do(self) -> None:
        """Its output goes where ours goes."""
        try:
            code = subprocess.run(self.argv, stdin=subprocess.DEVNULL, check=False).returncode
        except FileNotFoundError as error:
            raise InstallError(f"{self.argv[0]} is not there; kvwatch's service needs systemd") from error
        if code and not self.may_fail:
            raise InstallError(f"{' '.join(self.argv)}: exit status {code}")


@dataclass(frozen=True, slots=True)
class Places:
    """Where it goes: below which root, and where `kvwatch` and `python` will be."""

    root: Path
    kvwatch: Path
    python: Path

    def at(self, path: str) -> Path:
        """A path of the system, below the root."""
        return self.root / path.lstrip("/")

    @property
    def live(self) -> bool:
        """Whether this is the running system."""
        return self.root == Path("/")

    def text(self, name: str) -> str:
        """A shipped file with the paths of this installation."""
        text = (SHIPPED / name).read_text(encoding="utf-8")
        text = text.replace(f"{SHIPPED_BIN}/kvwatch", str(self.kvwatch))
        return text.replace(f"{SHIPPED_BIN}/python", str(self.python))


def main(args: argparse.Namespace) -> int:
    """0 when it is done (or said, with --dry-run), 2 for a call that cannot work, 3 when something failed."""
    root = Path(args.root or os.environ.get("DESTDIR") or "/").absolute()
    try:
        places = _places(root, args.prefix)
        if places.live and os.geteuid() != 0 and not args.dry_run:
            raise InstallError("must be root; or give --root DIR, or --dry-run")
        if args.purge and not args.uninstall:
            raise InstallError("--purge goes with --uninstall")
    except InstallError as error:
        print(f"kvwatch: install-service: {error}", file=sys.stderr)
        return EXIT_USAGE
    steps = (
        uninstall(places, purge=args.purge) if args.uninstall else install(places, start=not args.no_start)
    )
    try:
        _carry_out(steps, dry_run=args.dry_run)
    except BrokenPipeError:
        raise
    except (OSError, InstallError) as error:
        print(f"kvwatch: install-service: {error}", file=sys.stderr)
        return EXIT_CANNOT_START
    _say_the_end(args, places)
    return EXIT_OK


def _places(root: Path, prefix: str | None) -> Places:
    """Raises InstallError for an installation that the unit could not see."""
    if prefix is not None:
        folder = Path(prefix) / "bin"
        return Places(root, folder / "kvwatch", folder / "python")
    program = Path(sysconfig.get_path("scripts")) / "kvwatch"
    found = Places(root, program, Path(sys.executable))
    hidden = first_hidden(program, found.python, found.python.resolve())
    if hidden is not None:
        raise InstallError(
            f"{hidden} is below a home, which the service cannot see; install kvwatch into a virtual "
            "environment such as /opt/kvwatch first (`make install` does)"
        )
    if not program.exists():
        raise InstallError(f"{program} is not there; install kvwatch with pip first, or give --prefix DIR")
    return found


def first_hidden(*paths: Path) -> Path | None:
    """The first of these paths that ProtectHome= hides from the service."""
    folders = [Path(folder) for folder in HIDDEN]
    return next((path for path in paths if any(map(path.is_relative_to, folders))), None)


def install(places: Places, *, start: bool) -> Iterator[Step]:
    """What an installation does, in order. Running it again upgrades."""
    for path, name in FILES.items():
        yield Write(places.at(path), places.text(name))
    if not places.live:
        return
    yield Run(("systemd-sysusers", SYSUSERS))
    yield Run(("systemd-tmpfiles", "--create", TMPFILES))
    if not _systemd_runs():
        return
    yield Run(("systemctl", "daemon-reload"))
    if start:
        yield Run(("systemctl", "enable", "--quiet", "kvwatch.service"))
        yield Run(("systemctl", "restart", "kvwatch-exec.socket", "kvwatch.service"))


def uninstall(places: Places, *, purge: bool) -> Iterator[Step]:
    """The way back. Configuration, state and users stay, unless `purge`."""
    if places.live and _systemd_runs():
        units = ("kvwatch.service", "kvwatch-exec.socket")
        yield Run(("systemctl", "disable", "--now", "--quiet", *units), may_fail=True)
    for path in (*FILES, *(PURGED if purge else ())):
        if os.path.lexists(places.at(path)):
            yield Remove(places.at(path), places.root)
    if places.live and _systemd_runs():
        yield Run(("systemctl", "daemon-reload"))
    if places.live and purge:
        for user in USERS:
            yield Run(("userdel", user), may_fail=True)


def _systemd_runs() -> bool:
    return Path("/run/systemd/system").is_dir()


def _carry_out(steps: Iterator[Step], *, dry_run: bool) -> None:
    for step in steps:
        if dry_run:
            print(f"would {step.describe()}")
            continue
        step.do()
        if not isinstance(step, Run):
            print(step.describe())


def _say_the_end(args: argparse.Namespace, places: Places) -> None:
    if args.dry_run:
        return
    if args.uninstall:
        kept = [path for path in KEPT if places.at(path).exists()]
        print("removed kvwatch's service" + (f"; kept {', '.join(kept)}" if kept else ""))
        return
    config = places.at(DEFAULT_CONFIG)
    if config.exists():
        print(f"kept {config}")
    if not places.live:
        return
    if not _systemd_runs():
        print("systemd does not run here: nothing was started")
    elif args.no_start:
        print("start it with: systemctl enable --now kvwatch")
    else:
        print("running; look at http://127.0.0.1:9843/ and: journalctl -u kvwatch")
