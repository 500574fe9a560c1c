"""`kvwatch install-service`: what it says is what it writes, and it goes away again."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvwatch.cli import install, main
from tests.harness import ROOT

WRITTEN = {
    "etc/systemd/system/kvwatch.service",
    "etc/systemd/system/kvwatch-exec.socket",
    "etc/systemd/system/kvwatch-exec@.service",
    "usr/lib/sysusers.d/kvwatch.conf",
    "usr/lib/tmpfiles.d/kvwatch.conf",
    "etc/kvwatch/kvwatch.yml.example",
}


def tree(root: Path) -> set[str]:
    """Every file and every empty folder."""
    return {
        str(path.relative_to(root))
        for path in root.rglob("*")
        if not path.is_dir() or not any(path.iterdir())
    }


def run(root: Path, *arguments: str) -> int:
    return main(["install-service", "--root", str(root), "--prefix", "/opt/kvwatch", *arguments])


def test_a_dry_run_says_exactly_what_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Paths, modes and sizes are said beforehand, and nothing is touched meanwhile."""
    assert run(tmp_path, "--dry-run") == 0
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert tree(tmp_path) == set()

    assert run(tmp_path) == 0

    assert tree(tmp_path) == WRITTEN
    assert {words[2].removeprefix(f"{tmp_path}/") for words in said} == WRITTEN
    for _, verb, path, mode, size, _ in said:
        assert verb == "write"
        assert mode == f"({Path(path).stat().st_mode & 0o777:04o},"
        assert int(size) == Path(path).stat().st_size


def test_a_clean_root_is_clean_again(tmp_path: Path) -> None:
    """Installed and uninstalled in an empty root, nothing is left, no folder either."""
    assert run(tmp_path) == 0
    assert run(tmp_path, "--uninstall") == 0

    assert tree(tmp_path) == set()


def test_configuration_state_and_drop_ins_stay_until_purged(tmp_path: Path) -> None:
    """What people wrote and what kvwatch knows outlives an uninstall; --purge takes it as well."""
    assert run(tmp_path) == 0
    kept = {
        "etc/kvwatch/kvwatch.yml",
        "var/lib/kvwatch/outstanding.json",
        "etc/systemd/system/kvwatch.service.d/mine.conf",
    }
    for name in kept:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine\n")

    assert run(tmp_path) == 0
    assert (tmp_path / "etc/kvwatch/kvwatch.yml").read_text() == "mine\n"
    assert run(tmp_path, "--uninstall") == 0
    assert tree(tmp_path) == kept
    assert run(tmp_path, "--uninstall", "--purge") == 0
    assert tree(tmp_path) == set()


def test_uninstalling_nothing_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Twice is as good as once."""
    assert run(tmp_path, "--uninstall") == 0
    assert capsys.readouterr().out == "removed kvwatch's service\n"


def test_units_start_the_kvwatch_that_is_installed(tmp_path: Path) -> None:
    """Every path of the shipped units is that of the installation; nothing else in them changes."""
    assert main(["install-service", "--root", str(tmp_path), "--prefix", "/srv/watch"]) == 0
    for name in install.UNITS:
        text = (tmp_path / "etc/systemd/system" / name).read_text()
        assert "/opt/kvwatch/bin" not in text
        assert text == (install.SHIPPED / name).read_text().replace("/opt/kvwatch/bin", "/srv/watch/bin")

    assert (
        "ExecStart=/srv/watch/bin/kvwatch run\n"
        in (tmp_path / "etc/systemd/system/kvwatch.service").read_text()
    )


@pytest.mark.parametrize(
    ("path", "hidden"),
    [
        ("/home/me/venv/bin/kvwatch", True),
        ("/root/.local/bin/kvwatch", True),
        ("/homes/x", False),
        ("/opt/x", False),
    ],
)
def test_a_kvwatch_that_the_service_cannot_see_is_noticed(path: str, hidden: bool) -> None:
    """ProtectHome hides homes; a folder that only begins like one is seen."""
    assert (install.first_hidden(Path("/usr/bin/python3"), Path(path)) is not None) == hidden


def test_a_file_in_the_way_is_said_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line names what could not be written, with status 3, and half a unit is never left."""
    (tmp_path / "etc").write_text("")

    assert run(tmp_path) == 3
    assert str(tmp_path / "etc") in capsys.readouterr().err
    assert tree(tmp_path) == {"etc"}


@pytest.mark.needs("root", "setpriv")
def test_only_root_installs_into_the_running_system() -> None:
    """Anybody else is told what to do instead, and nothing is begun."""
    python = "/usr/bin/python3"
    if not os.access(python, os.X_OK):
        pytest.fail(f"{python} is not there")
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", python, "-m", "kvwatch",
         "install-service", "--prefix", "/opt/kvwatch"],
        cwd=ROOT, env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 2, done
    assert "must be root" in done.stderr


def test_purge_goes_with_uninstall(tmp_path: Path) -> None:
    """A slip of the pen deletes nothing."""
    assert run(tmp_path, "--purge") == 2
    assert tree(tmp_path) == set()


def test_what_it_writes_is_in_the_package() -> None:
    """A wheel holds every shipped file, and systemd/ in the checkout shows the same ones."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packed = {path for pattern in table["kvwatch"] for path in (ROOT / "kvwatch").glob(pattern)}

    assert {install.SHIPPED / name for name in install.FILES.values()} <= packed
    for shipped in (ROOT / "systemd").iterdir():
        assert (install.SHIPPED / shipped.name).resolve() == shipped


def test_it_needs_nothing_but_python() -> None:
    """`make install` calls it before any dependency is there."""
    code = "import sys\nfrom kvwatch.cli import install\nprint(*sorted(m.split('.')[0] for m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()

    assert not {"yaml", "prometheus_client", "pynvml"} & set(done)
