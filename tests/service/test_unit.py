"""What the unit file says, without starting anything."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.service.lab import REPOSITORY

UNIT = REPOSITORY / "systemd/kvwatch.service"
INSTALL = REPOSITORY / "packaging/install.sh"


@pytest.mark.needs("systemd-analyze")
def test_exposure_stays_at_two_or_below() -> None:
    """The sandbox scores 2.0 or better by systemd's own measure."""
    command = ["systemd-analyze", "security", "--offline=yes", "--threshold=20", str(UNIT)]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout[-400:] + done.stderr


def test_case_E9_a_stuck_nvml_worker_is_never_killed_hard() -> None:
    """Only TERM is sent to what is left after the daemon, and there is time and memory for it."""
    text = UNIT.read_text()

    assert "KillMode=mixed" in text
    assert "FinalKillSignal=SIGTERM" in text
    assert int(re.findall(r"^TimeoutStopSec=(\d+)s$", text, re.M)[0]) >= 60
    assert int(re.findall(r"^MemoryMax=(\d+)M$", text, re.M)[0]) >= 256


def test_case_E14_devices_are_allowed_by_class() -> None:
    """A path would be resolved once, at a moment when the driver may not be there; a class never is."""
    allowed = re.findall(r"^DeviceAllow=(\S+) ", UNIT.read_text(), re.M)

    assert "char-nvidia-uvm" in allowed
    assert all(device.startswith("char-") for device in allowed)


def test_bad_configuration_is_not_retried() -> None:
    """Exit status 2 ends the restarts; everything else is retried for ever."""
    text = UNIT.read_text()

    assert "RestartPreventExitStatus=2" in text
    assert "StartLimitIntervalSec=0" in text


def _tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir() or path.is_symlink()}


def _install(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(INSTALL), *arguments, "--root", str(root)],
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "KVWATCH_SKIP_VENV": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_install_can_be_undone(tmp_path: Path) -> None:
    """Uninstall with --purge leaves no file behind; without it configuration stays."""
    assert _install(tmp_path, "install").returncode == 0
    config = tmp_path / "etc/kvwatch/kvwatch.yml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text("{}\n")

    assert "etc/systemd/system/kvwatch.service" in _tree(tmp_path)
    assert _install(tmp_path, "uninstall").returncode == 0
    assert _tree(tmp_path) == {"etc/kvwatch/kvwatch.yml"}
    assert _install(tmp_path, "uninstall", "--purge").returncode == 0
    assert _tree(tmp_path) == set()


def test_install_configures_no_server_that_may_not_be_there(tmp_path: Path) -> None:
    """A fresh install brings an example and no configuration: kvwatch then watches what it finds."""
    assert _install(tmp_path, "install").returncode == 0

    assert "etc/kvwatch/kvwatch.yml.example" in _tree(tmp_path)
    assert "etc/kvwatch/kvwatch.yml" not in _tree(tmp_path)


def test_install_keeps_a_configuration_that_is_there(tmp_path: Path) -> None:
    """An upgrade never touches the operator's file."""
    config = tmp_path / "etc/kvwatch/kvwatch.yml"
    config.parent.mkdir(parents=True)
    config.write_text("tick: 1s\n")

    done = _install(tmp_path, "install")

    assert done.returncode == 0, done.stderr
    assert config.read_text() == "tick: 1s\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("frobnicate",), "unknown command"),
        (("install", "--frob"), "unknown option"),
    ],
)
def test_install_explains_a_wrong_call(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    """A wrong word ends with status 2 and one line that names it."""
    done = _install(tmp_path, *arguments)

    assert done.returncode == 2
    assert says in done.stderr


def test_install_script_is_plain_sh() -> None:
    """The script parses in the smallest shell that is there."""
    shell = shutil.which("dash") or "/bin/sh"

    done = subprocess.run([shell, "-n", str(INSTALL)], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
