"""`kvwatch run`: the daemon in the foreground."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvwatch import config
from kvwatch.cli import EXIT_CANNOT_START, EXIT_USAGE, default_config
from kvwatch.cli import log as log_lines
from kvwatch.cli.lookout import Lookout
from kvwatch.daemon import paths as daemon_paths
from kvwatch.daemon.app import App, ReloadError
from kvwatch.daemon.lifecycle import Lifecycle
from kvwatch.daemon.watchlist import GpuFactory, gpu_factory
from kvwatch.exporters.lines import TextWriter
from kvwatch.exporters.web_config import BadCertificateError
from kvwatch.model.report import Event
from kvwatch.model.settings import Mode, Settings

if TYPE_CHECKING:
    from kvwatch.lab.demo import Demo

log = logging.getLogger("kvwatch")

# Stacks are virtual memory only; deeply nested JSON needs more than the 256 KiB a small one has.
THREAD_STACK_BYTES = 1024 * 1024


class CannotStartError(Exception):
    """Something outside is in the way: a port, a directory, another kvwatch."""


def main(args: argparse.Namespace) -> int:
    """Run until stopped; 0 as asked, 2 bad configuration, 3 cannot start."""
    lifecycle = Lifecycle()
    lifecycle.install()
    threading.stack_size(THREAD_STACK_BYTES)
    try:
        with ExitStack() as stack:
            stack.callback(log_lines.set_up(args.log_level).close)
            return _run(args, lifecycle, stack)
    except ReloadError as error:
        print("\n".join(error.findings), file=sys.stderr)
        return EXIT_USAGE
    except (CannotStartError, daemon_paths.DirectoryError) as error:
        print(f"kvwatch: cannot start: {error}", file=sys.stderr)
        return EXIT_CANNOT_START


def _run(args: argparse.Namespace, lifecycle: Lifecycle, stack: ExitStack) -> int:
    demo = _start_demo(args, stack)
    lookout = Lookout()
    load = _loader(args, demo, lookout)
    settings = load()
    paths = _paths(demo, stack)
    daemon_paths.prepare(paths)
    _take_lock(paths.lock, stack)
    terminal = _terminal(demo, stack)
    app = App(
        settings,
        paths,
        load=load,
        finder=lookout,
        gpu_factory=_demo_gpus(demo) if demo else gpu_factory(paths.runtime, paths.state),
        lifecycle=lifecycle,
        demo=args.demo or "",
        on_events=_event_sink(terminal, stack),
    )
    stack.callback(app.close)
    url = _serve(app, settings, stack)
    if demo is not None and terminal is not None:
        _tell(demo, url, terminal)
    log.info("serving on %s", url)
    _settle_memory()
    return app.run()


def _settle_memory() -> None:
    """What start-up made lives as long as the process: the collector need not walk it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


def _start_demo(args: argparse.Namespace, stack: ExitStack) -> Demo | None:
    if args.demo is None:
        return None
    from kvwatch.lab import demo as demo_module

    demo = demo_module.start(args.demo, config.default_settings(), speed=_demo_speed())
    stack.callback(demo.close)
    return demo


def _demo_speed() -> float:
    """How fast the demo's story runs; only the endurance checks set it."""
    return float(os.environ.get("KVWATCH_DEMO_SPEED", "1"))


def _demo_gpus(demo: Demo) -> GpuFactory:
    return lambda _settings, _tick_s: demo.gpu_source


def _loader(args: argparse.Namespace, demo: Demo | None, lookout: Lookout) -> Callable[[], Settings]:
    """What start and every reload call: the file (or the demo, or what is found), with the flags on top."""

    def load() -> Settings:
        return _with_flags(_read(args, demo, lookout), args)

    return load


def _read(args: argparse.Namespace, demo: Demo | None, lookout: Lookout) -> Settings:
    if demo is not None:
        return demo.settings
    file = args.config or default_config()
    if file is None:
        return replace(config.default_settings(), servers=tuple(lookout.start()))
    try:
        settings = config.load(file, mode=None if args.mode is None else Mode(args.mode))
    except config.ConfigError as error:
        raise ReloadError([str(finding) for finding in error.findings]) from error
    except config.UnreadableConfig as error:
        raise ReloadError([str(error)]) from error
    lookout.active = False
    return settings


def _with_flags(settings: Settings, args: argparse.Namespace) -> Settings:
    web = settings.web
    if args.listen is not None:
        try:
            host, port = config.parse_listen(args.listen)
        except ValueError as error:
            raise ReloadError([f"--web.listen-address: {error}"]) from error
        web = replace(web, host=host, port=port)
    web = replace(
        web,
        config_file=args.web_config or web.config_file,
        enable_lifecycle=args.lifecycle or web.enable_lifecycle,
    )
    control = settings.control
    if args.mode is not None:
        control = replace(control, mode=Mode(args.mode))
    return replace(settings, web=web, control=control)


def _paths(demo: Demo | None, stack: ExitStack) -> daemon_paths.Paths:
    """The host's directories, or for the demo a folder that vanishes with it."""
    if demo is None:
        return daemon_paths.find()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvwatch-demo-")))
    return daemon_paths.Paths(runtime=folder / "run", state=folder / "state")


def _take_lock(path: Path, stack: ExitStack) -> None:
    """Two daemons on one host would undo each other's limits: the second does not start."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise CannotStartError(f"{path}: {error.strerror}; make room, or give it to this user") from error
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
        raise CannotStartError(
            f"another kvwatch runs here (pid {holder}, lock {path}); stop it first"
        ) from error
    with contextlib.suppress(OSError):  # a full disk: the lock holds, it only cannot say who has it
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)


def _serve(app: App, settings: Settings, stack: ExitStack) -> str:
    from kvwatch.exporters.web import WebServer

    web = settings.web
    try:
        web_config = config.web_config_reader(web.config_file)
    except config.ConfigError as error:
        raise ReloadError([str(finding) for finding in error.findings]) from error
    except config.UnreadableConfig as error:
        raise ReloadError([str(error)]) from error
    server = WebServer(web.host, web.port, app, enable_lifecycle=web.enable_lifecycle, web_config=web_config)
    try:
        server.start()
    except BadCertificateError as error:
        raise ReloadError([f"{web.config_file}: tls_server_config: {error}"]) from error
    except OSError as error:
        raise CannotStartError(
            f"cannot listen on {web.host}:{web.port} ({error.strerror}); "
            "free the port or set --web.listen-address"
        ) from error
    stack.callback(server.close)
    return server.url


def _terminal(demo: Demo | None, stack: ExitStack) -> TextWriter | None:
    """Where the demo tells its story; it may be a pipe that nobody reads."""
    if demo is None:
        return None
    terminal = TextWriter(sys.stdout.fileno(), name="terminal")
    stack.callback(terminal.close)
    return terminal


def _event_sink(terminal: TextWriter | None, stack: ExitStack) -> Callable[[tuple[Event, ...]], None]:
    """Where audit events go: JSON lines on standard output; in the demo a sentence for a level change."""
    if terminal is not None:
        from kvwatch.cli.story import level_lines

        return lambda events: terminal.offer(level_lines(events))
    from kvwatch.exporters.events import JournalWriter

    fd = sys.stdout.fileno()
    journal = JournalWriter(fd, prefix=log_lines.read_by_journal(fd))
    stack.callback(journal.close)
    return journal.offer


def _tell(demo: Demo, url: str, terminal: TextWriter) -> None:
    """The demo's story on the terminal: where to look, and a line when something begins."""
    terminal.offer([f"kvwatch demo\n  status page  {url}/\n  metrics      {url}/metrics\n{demo.describe()}"])

    def narrate() -> None:
        import time

        begun_s, speed = time.monotonic(), _demo_speed()
        while True:
            elapsed_s = speed * (time.monotonic() - begun_s)
            line = demo.narrate(elapsed_s)
            if line:
                terminal.offer([f"{elapsed_s:5.0f} s  {line}"])
            time.sleep(0.5)

    threading.Thread(target=narrate, name="narrator", daemon=True).start()
