"""The command line as a person meets it: exit statuses, help, probe, maintenance."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.nvml import Scenario, build, environment, uuid_of
from tests.harness import ROOT

GIB = 2**30
COMMANDS = ("run", "check", "probe", "maintenance", "restore", "gen")


def kvwatch(
    *arguments: str, folder: Path, extra: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """One run of the command with directories of its own."""
    own = {"RUNTIME_DIRECTORY": str(folder / "run"), "STATE_DIRECTORY": str(folder / "state")}
    return subprocess.run(
        [sys.executable, "-m", "kvwatch", *arguments],
        cwd=ROOT,
        env=os.environ | own | (extra or {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def fake(tmp_path: Path) -> dict[str, str]:
    """Two fake GPUs, one of them busy."""
    directory = build(tmp_path / "fake")
    scenario = Scenario(tmp_path / "scenario", gpus=2).memory(1, 30 * GIB).write()
    return environment(directory, scenario.path)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_an_example(command: str, tmp_path: Path) -> None:
    """`--help` of every command exits 0 and shows one command line to copy."""
    result = kvwatch(command, "--help", folder=tmp_path)

    assert result.returncode == 0
    assert f"example: kvwatch {command}" in result.stdout


def test_an_unknown_command_is_a_usage_error(tmp_path: Path) -> None:
    """Exit 2, and the known commands are named."""
    result = kvwatch("wach", folder=tmp_path)

    assert result.returncode == 2
    assert "probe" in result.stderr


def test_check_tells_good_from_bad_from_unreadable(tmp_path: Path) -> None:
    """0 and silence, 1 and findings with places, 2 and the path."""
    good, bad = tmp_path / "good.yml", tmp_path / "bad.yml"
    good.write_text("servers:\n  - {name: chat, kind: vllm, url: 'http://127.0.0.1:8000'}\n")
    bad.write_text("tick: 5\nservers: []\nfoo: 1\n")

    well = kvwatch("check", str(good), folder=tmp_path)
    ill = kvwatch("check", str(bad), folder=tmp_path)
    gone = kvwatch("check", str(tmp_path / "none.yml"), folder=tmp_path)

    assert (well.returncode, well.stdout, well.stderr) == (0, "", "")
    assert ill.returncode == 1
    assert [line.split(": ")[0] for line in ill.stderr.splitlines()] == [f"{bad}:1:7", f"{bad}:3:1"]
    assert gone.returncode == 2
    assert str(tmp_path / "none.yml") in gone.stderr


@pytest.mark.needs("gcc")
def test_check_names_mistakes_of_the_web_configuration_too(tmp_path: Path) -> None:
    """What would keep the daemon from starting is found before, with the place in the file that it is in."""
    web, main = tmp_path / "web.yml", tmp_path / "kvwatch.yml"
    web.write_text("basic_auth_users:\n  prometheus: secret\n")
    main.write_text(f"web: {{config_file: {web}}}\n")
    ill = kvwatch("check", str(main), folder=tmp_path)
    web.write_text("http_server_config: {http2: false}\n")
    well = kvwatch("check", str(main), folder=tmp_path)

    assert ill.returncode == 1
    assert ill.stderr.startswith(f"{web}:2:3: basic_auth_users.prometheus: is no bcrypt hash")
    assert (well.returncode, well.stderr) == (0, "")


def test_probe_sees_the_gpus_and_writes_a_configuration_that_checks(
    tmp_path: Path, fake: dict[str, str]
) -> None:
    """What probe writes, `check` accepts as it is."""
    target = tmp_path / "found.yml"
    told = kvwatch("probe", "--json", "--write", str(target), folder=tmp_path, extra=fake)
    gpus = json.loads(told.stdout)["gpus"]
    checked = kvwatch("check", str(target), folder=tmp_path)

    assert told.returncode == 0
    assert [gpu["uuid"] for gpu in gpus] == [uuid_of(0), uuid_of(1)]
    assert gpus[1]["used_bytes"] == 30 * GIB
    assert "expect: 2" in target.read_text()
    assert (checked.returncode, checked.stderr) == (0, "")


def test_probe_never_overwrites_a_file(tmp_path: Path) -> None:
    """A configuration that is there stays, and exit 2 says so."""
    target = tmp_path / "mine.yml"
    target.write_text("tick: 1s\n")
    told = kvwatch("probe", "--write", str(target), folder=tmp_path, extra={"LD_LIBRARY_PATH": str(tmp_path)})

    assert (told.returncode, target.read_text()) == (2, "tick: 1s\n")
    assert "exists" in told.stderr


def test_probe_without_a_driver_says_why(tmp_path: Path) -> None:
    """No driver is no error of ours: exit 0, and the reason with a fix."""
    told = kvwatch("probe", folder=tmp_path, extra={"LD_LIBRARY_PATH": str(tmp_path)})

    assert told.returncode == 0
    assert "GPUs: none readable" in told.stdout


@pytest.mark.needs("gcc")
def test_probe_watch_tells_what_a_slow_reader_misses(tmp_path: Path, fake: dict[str, str]) -> None:
    """`--watch` prints the peak it saw and the peak that a 15 s reader saw, for every GPU."""
    told = kvwatch("probe", "--watch", "2s", "--json", folder=tmp_path, extra=fake)
    gpus = json.loads(told.stdout)["gpus"]

    assert told.returncode == 0
    assert set(gpus) == {uuid_of(0), uuid_of(1)}
    assert gpus[uuid_of(1)]["peak_bytes"] == 30 * GIB


def test_maintenance_on_and_off(tmp_path: Path) -> None:
    """On says until when, off says so, off twice says that there was none; a bad time is exit 2."""
    on = kvwatch("maintenance", "on", "--for", "10m", folder=tmp_path)
    switch = json.loads((tmp_path / "run/maintenance.json").read_text())
    off = kvwatch("maintenance", "off", folder=tmp_path)
    again = kvwatch("maintenance", "off", folder=tmp_path)
    bad = kvwatch("maintenance", "on", "--for", "soon", folder=tmp_path)

    assert on.returncode == off.returncode == again.returncode == 0
    assert switch["v"] == 1
    assert "ended" in off.stdout
    assert "no maintenance" in again.stdout
    assert bad.returncode == 2


def test_restore_with_nothing_to_give_back(tmp_path: Path) -> None:
    """Exit 0 and silence."""
    result = kvwatch("restore", folder=tmp_path)

    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_run_with_a_bad_configuration_does_not_start(tmp_path: Path) -> None:
    """Exit 2 with every finding."""
    bad = tmp_path / "bad.yml"
    bad.write_text("tick: 5\n")
    result = kvwatch("run", "--config", str(bad), folder=tmp_path)

    assert result.returncode == 2
    assert f"{bad}:1:7: tick:" in result.stderr
