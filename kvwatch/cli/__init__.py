"""The command line. Each subcommand imports what it needs when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvwatch import __version__
from kvwatch.cli import streams

EXIT_OK = 0
EXIT_FINDINGS = 1
EXIT_USAGE = 2
EXIT_CANNOT_START = 3

DEFAULT_CONFIG = "/etc/kvwatch/kvwatch.yml"
SCENARIOS = ("tour", "calm", "overload", "leak", "faults", "all")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run one subcommand, return its exit status."""
    streams.fill()
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        return int(args.handler(args))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone (`kvwatch probe | head`): that is not an error.
        sys.stderr.close()
        return EXIT_OK


def default_config(file: str = DEFAULT_CONFIG) -> str | None:
    """The default file, also when this user may not look at it, or when it is a link that leads nowhere (for
    a moment, say, while its target is replaced): that is then said, not passed over."""
    try:
        Path(file).lstat()
    except FileNotFoundError:
        return None
    except OSError:
        return file
    return file


def build_parser() -> argparse.ArgumentParser:
    """Every subcommand with its flags, one example each."""
    parser = argparse.ArgumentParser(
        prog="kvwatch",
        description="Watches GPU memory and KV caches together, warns early, acts reversibly.",
        epilog="example: kvwatch run --demo",
    )
    parser.add_argument("--version", action="version", version=f"kvwatch {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    for add in (_add_run, _add_check, _add_probe, _add_maintenance, _add_restore, _add_install, _add_gen):
        add(commands)
    return parser


_Commands = argparse._SubParsersAction  # the type argparse returns but does not export


def _command(
    commands: _Commands[argparse.ArgumentParser], name: str, summary: str, example: str
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=f"example: {example}",
    )


def _add_run(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "run",
        "Run the daemon in the foreground.",
        "kvwatch run --config /etc/kvwatch/kvwatch.yml",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"configuration; default {DEFAULT_CONFIG} if it exists, else what `kvwatch probe` finds",
    )
    parser.add_argument(
        "--demo",
        nargs="?",
        const="tour",
        choices=SCENARIOS,
        metavar="SCENARIO",
        help=f"simulated GPUs and server instead of real ones; one of {', '.join(SCENARIOS)} (default tour)",
    )
    parser.add_argument("--mode", choices=("observe", "advise", "act"), help="overrides control.mode")
    parser.add_argument("--web.listen-address", dest="listen", metavar="ADDR", help="overrides web.listen")
    parser.add_argument(
        "--web.config.file",
        dest="web_config",
        metavar="FILE",
        help="TLS and basic auth, in exporter-toolkit's format",
    )
    parser.add_argument(
        "--web.enable-lifecycle",
        dest="lifecycle",
        action="store_true",
        help="allow POST /-/reload",
    )
    parser.add_argument(
        "--log.level",
        dest="log_level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="what is logged to standard error (default info)",
    )
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    from kvwatch.cli import run

    return run.main(args)


def _add_check(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "check",
        "Check a configuration: every finding as FILE:line:col, nothing when it is good.",
        "kvwatch check /etc/kvwatch/kvwatch.yml",
    )
    parser.add_argument(
        "file", metavar="FILE", nargs="?", help=f"default: {DEFAULT_CONFIG}, which need not exist"
    )
    parser.set_defaults(handler=_check)


def _check(args: argparse.Namespace) -> int:
    from kvwatch import config

    try:
        file = args.file or default_config()
        if file is not None:
            config.web_config_reader(config.load(file).web.config_file)  # raises for its findings too
    except config.ConfigError as error:
        for finding in error.findings:
            print(finding, file=sys.stderr)
        return EXIT_FINDINGS
    except config.UnreadableConfig as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    return EXIT_OK


def _add_probe(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "probe",
        "Say what can be seen from here, what cannot and why, and offer a ready configuration.",
        "kvwatch probe --write kvwatch.yml",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.add_argument("--write", metavar="FILE", help="write a configuration for what was found")
    parser.add_argument(
        "--watch",
        metavar="TIME",
        help="sample GPU memory for this long (10m) and say what a 15 s reader would have missed",
    )
    parser.set_defaults(handler=_probe)


def _probe(args: argparse.Namespace) -> int:
    from kvwatch.cli import probe

    return probe.main(args)


def _add_maintenance(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "maintenance",
        "Release the GPUs for a reset or a MIG change; ends by itself.",
        "kvwatch maintenance on --for 30m",
    )
    parser.add_argument("state", choices=("on", "off"))
    parser.add_argument(
        "--for", dest="duration", default="30m", metavar="TIME", help="how long (default 30m, at most 24h)"
    )
    parser.set_defaults(handler=_maintenance)


def _maintenance(args: argparse.Namespace) -> int:
    from kvwatch.cli import maintenance

    return maintenance.main(args)


def _add_restore(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "restore",
        "Give back every limit that a kvwatch which is no longer running left behind.",
        "kvwatch restore",
    )
    parser.set_defaults(handler=_restore)


def _restore(args: argparse.Namespace) -> int:
    from kvwatch.cli import restore

    return restore.main(args)


def _add_install(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "install-service",
        "Install this kvwatch as a systemd service, or take the service away again.",
        "kvwatch install-service --dry-run",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be written and run")
    parser.add_argument("--uninstall", action="store_true", help="undo it; configuration and state stay")
    parser.add_argument("--purge", action="store_true", help="with --uninstall: these and the users go too")
    parser.add_argument("--no-start", action="store_true", help="put everything in place, start nothing")
    parser.add_argument(
        "--root", metavar="DIR", help="build a tree for a package or image: no users, no systemctl"
    )
    parser.add_argument(
        "--prefix", metavar="DIR", help="the virtual environment with kvwatch; default: the one that runs"
    )
    parser.set_defaults(handler=_install)


def _install(args: argparse.Namespace) -> int:
    from kvwatch.cli import install

    return install.main(args)


def _add_gen(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "gen",
        "Write the generated files of a source checkout (dashboards, alerts, reference pages).",
        "kvwatch gen --check",
    )
    parser.add_argument("--check", action="store_true", help="only compare; exit 1 on any difference")
    parser.set_defaults(handler=_gen)


def _gen(args: argparse.Namespace) -> int:
    from kvwatch import gen

    if not (Path.cwd() / "kvwatch" / "gen").is_dir():
        print("kvwatch: gen works in a source checkout of kvwatch; change into it first", file=sys.stderr)
        return EXIT_USAGE
    try:
        differing = gen.run(Path.cwd(), check=args.check)
    except ModuleNotFoundError as error:
        print(f"kvwatch: gen needs {error.name}, a development tool; `make gen` installs it", file=sys.stderr)
        return EXIT_USAGE
    for name in differing:
        print(f"{'differs' if args.check else 'written'}: {name}", file=sys.stderr)
    return EXIT_FINDINGS if args.check and differing else EXIT_OK
