"""`python -m kvwatch.agent run`, and the two lines for programs of one's own, with a made torch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvwatch.wire_datagram import decode
from tests.harness import ROOT

TORCH = """
class Cuda:
    def is_initialized(self): return True
    def device_count(self): return 1
    def memory_stats(self, device):
        return {"reserved_bytes.all.current": 5 << 20, "allocated_bytes.all.current": 3 << 20, "num_ooms": 0}
    def memory_snapshot(self): return []
    def mem_get_info(self, device): return 1 << 30, 2 << 30
    def get_device_properties(self, device): return None
cuda = Cuda()
"""


class Desk:
    """A folder with a made torch, a listening socket, and programs that run beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "lib").mkdir()
        (folder / "lib" / "torch.py").write_text(TORCH)
        self.ears = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.ears.bind(str(folder / "agent.sock"))
        self.ears.settimeout(20)

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=os.environ
            | {"PYTHONPATH": str(self.folder / "lib"), "KVWATCH_RUNTIME": str(self.folder)}
            | variables,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    found = Desk(tmp_path)
    yield found
    found.ears.close()


PROGRAM = "import sys, time, torch; time.sleep(0.5); print(sys.argv[1:]); sys.exit(7)"


def test_run(desk: Desk) -> None:
    """The command keeps its arguments, output and status, and its allocator is published under its pid."""
    program = PROGRAM.replace("print(", "import os; print(os.getpid(), ")
    ended = desk.run(
        "-m", "kvwatch.agent", "run", "--server", "train", "--", sys.executable, "-c", program, "a b"
    )
    found = decode(desk.ears.recv(20_000)).state

    assert ended.returncode == 7
    pid, _, rest = ended.stdout.strip().partition(" ")
    assert rest == "['a b']"
    assert (found.server, found.pid, found.host) == ("train", int(pid), "torch")
    assert found.allocator is not None
    assert found.allocator.allocated_bytes == 3 << 20
    assert found.allocator.largest_allocatable_bytes == (1 << 30) - (64 << 20)


def test_program_without_torch_is_left_alone(desk: Desk) -> None:
    """A process that never imports torch has no thread and sends nothing."""
    program = "import threading; print([thread.name for thread in threading.enumerate()])"
    ended = desk.run("-m", "kvwatch.agent", "run", "--server", "train", "--", sys.executable, "-c", program)

    assert ended.stdout.strip() == "['MainThread']"
    desk.ears.settimeout(0.05)
    with pytest.raises(TimeoutError):
        desk.ears.recv(20_000)


def test_hidden_sitecustomize_still_runs(desk: Desk) -> None:
    """The environment's own sitecustomize is not lost."""
    (desk.folder / "lib" / "sitecustomize.py").write_text("import builtins; builtins.seen = 'still here'")
    ended = desk.run("-m", "kvwatch.agent", "run", "--server", "t", "--", sys.executable, "-c", "print(seen)")

    assert ended.stdout.strip() == "still here"


def test_other_environment(desk: Desk) -> None:
    """A Python that has no kvwatch of its own is watched as well, and sees none of kvwatch's neighbours."""
    program = PROGRAM.replace("print(", "print([path for path in sys.path if path.endswith('kvwatch')], ")
    ended = desk.run(
        "-m", "kvwatch.agent", "run", "--server", "t", "--",
        "/usr/bin/env", "-C", str(desk.folder), sys.executable, "-S", "-c", "import sitecustomize;" + program,
    )  # fmt: skip

    assert ended.stdout.startswith("[]"), ended.stderr
    assert decode(desk.ears.recv(20_000)).state.server == "t"


@pytest.mark.parametrize(
    "arguments",
    [[], ["run"], ["run", "--"], ["run", "python"], ["fly", "--", "true"], ["run", "--", "true"],
     ["run", "--server", "../x", "--", "true"], ["run", "--server", "x", "--", "/no/such/program"]],
    ids=" ".join,
)  # fmt: skip
def test_usage(desk: Desk, arguments: list[str]) -> None:
    """What cannot be run is one clear sentence and status 2."""
    ended = desk.run("-m", "kvwatch.agent", *arguments, KVWATCH_SERVER="")

    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert ended.stderr.strip()


def test_two_lines(desk: Desk) -> None:
    """An import and a call publish a program's allocator; calling again changes nothing."""
    program = (
        "import torch, time, threading\nimport kvwatch.agent\n"
        "print(kvwatch.agent.start('train'), kvwatch.agent.start('train'))\ntime.sleep(0.4)\n"
        "print(sum(thread.name == 'kvwatch-agent' for thread in threading.enumerate()))"
    )
    ended = desk.run("-c", program)

    assert ended.stdout.split() == ["True", "True", "1"]
    assert decode(desk.ears.recv(20_000)).state.server == "train"


def test_start_without_a_name(desk: Desk) -> None:
    """Without a name nothing starts; a name that kvwatch would not take is said, never raised."""
    program = "import kvwatch.agent; print(kvwatch.agent.start(), kvwatch.agent.start('No Such'))"
    ended = desk.run("-c", program, KVWATCH_SERVER="")

    assert ended.stdout.split() == ["False", "False"]
    assert ended.returncode == 0


def test_crash_of_the_program_is_its_own(desk: Desk) -> None:
    """A program that dies is not kept alive by the agent's thread, nor its error changed."""
    ended = desk.run("-c", "import torch, kvwatch.agent; kvwatch.agent.start('t'); raise SystemExit(9)")

    assert ended.returncode == 9
