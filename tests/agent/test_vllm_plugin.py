"""vLLM's plugin: what it wraps and when, in a made package of vLLM's shape (the real one: checks/agent)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvwatch import wire
from kvwatch.agent.vllm_scheduler import refusal
from tests.harness import ROOT

SCHEDULER = """
from types import SimpleNamespace as Name
class Block:
    is_null = False
    def __init__(self, used): self.ref_cnt, self.block_hash = int(used), None
class Pool:
    num_gpu_blocks = 9
    def __init__(self):
        self.blocks = [Block(number < 4) for number in range(9)]
        self.blocks[8].is_null = True
    def get_num_free_blocks(self): return 4
class Scheduler:
    {own}
    def __init__(self):
        self.running, self.waiting = [Name(request_id="a", num_computed_tokens=50)], []
        self.max_num_running_reqs = 16
        self.vllm_config = Name(parallel_config=Name(data_parallel_rank=3))
        group = type("FullAttentionManager", (), {{}})()
        group.block_size, group.req_to_blocks = 16, {{"a": self.blocks()}}
        self.kv_cache_manager = Name(block_pool=Pool(), coordinator=Name(single_type_managers=[group]))
    def blocks(self): return [Block(True)] * 4
    def schedule(self, throttle=False): return ("scheduled", throttle, self.{limit})
class Async(Scheduler):
    pass
"""
NEW = SCHEDULER.format(own="max_num_active_reqs = 16", limit="max_num_active_reqs")
OLD = SCHEDULER.format(own="", limit="max_num_running_reqs")


class Fake:
    """A made vLLM in a folder of its own, and programs that run beside it."""

    def __init__(self, folder: Path, *, version: str = "0.32.0", scheduler: str = NEW) -> None:
        self.folder = folder
        package = folder / "vllm" / "v1" / "core" / "sched"
        package.mkdir(parents=True)
        for part in (folder / "vllm", *list((folder / "vllm").rglob("*"))):
            (part / "__init__.py").write_text("")
        (folder / "vllm" / "__init__.py").write_text(f"__version__ = {version!r}\n")
        (package / "scheduler.py").write_text(scheduler)
        (folder / "limits").mkdir()

    def run(self, program: str, *, server: str = "chat") -> str:
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT}:{self.folder}",
            "KVWATCH_SERVER": server,
            "KVWATCH_RUNTIME": str(self.folder),
        }
        start = "import sys, time\nfrom kvwatch.agent.vllm_plugin import register\n"
        found = subprocess.run(
            [sys.executable, "-c", start + program],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert found.returncode == 0, found.stderr
        return "\n".join((found.stdout.strip(), found.stderr.strip())).strip()

    def lease(self, **limit: object) -> None:
        fields: dict[str, object] = {"server": "chat", "boot_id": wire.boot_id(), "seq": 1, "ttl_s": 60}
        wire.write(self.folder / "limits", wire.Lease(**fields | limit))  # type: ignore[arg-type]


IMPORT = "from vllm.v1.core.sched.scheduler import Scheduler, Async\n"


@pytest.mark.parametrize("order", [f"register()\n{IMPORT}", f"{IMPORT}register()\n"], ids=["before", "after"])
@pytest.mark.parametrize("kind", ["Scheduler", "Async"])
def test_limit_is_obeyed(tmp_path: Path, order: str, kind: str) -> None:
    """Registered before or after the import, and for subclasses, a step sees the lease; arguments pass."""
    fake = Fake(tmp_path)
    fake.lease(max_running=5)

    assert fake.run(f"{order}print({kind}().schedule(throttle=7))") == "('scheduled', 7, 5)"


def test_registered_many_times(tmp_path: Path) -> None:
    """Being called several times wraps once."""
    program = (
        f"register(); register()\n{IMPORT}register()\nfirst = Scheduler.schedule; register()\n"
        "original = first.__wrapped__\n"
        "print(first is Scheduler.schedule, original.__qualname__, hasattr(original, '__wrapped__'))"
    )

    assert Fake(tmp_path).run(program) == "True Scheduler.schedule False"


def test_without_a_name_nothing_is_touched(tmp_path: Path) -> None:
    """Installed but not asked for, it imports nothing and wraps nothing."""
    program = (
        f"register()\n{IMPORT}"
        "print(hasattr(Scheduler.schedule, '__wrapped__'), 'kvwatch.wire' in sys.modules)"
    )

    assert Fake(tmp_path).run(program, server="") == "False False"


def test_registering_imports_no_vllm(tmp_path: Path) -> None:
    """The processes that never schedule never pay for the scheduler's import."""
    program = "register()\nprint([name for name in sys.modules if name.startswith('vllm')])"

    assert Fake(tmp_path).run(program) == "[]"


def test_old_class_is_never_set_below_what_runs(tmp_path: Path) -> None:
    """Without max_num_active_reqs the bound follows the running ones down, and goes back at the end."""
    fake = Fake(tmp_path, version="0.20.1", scheduler=OLD)
    fake.lease(max_running=2)
    program = (
        f"register()\n{IMPORT}s = Scheduler(); s.running *= 7\n"
        "print(s.schedule()[2]); s.running.pop(); print(s.schedule()[2]); s.running = s.running[:1]\n"
        "print(s.schedule()[2])\n"
        "import os; os.unlink(os.environ['KVWATCH_RUNTIME'] + '/limits/chat.json'); time.sleep(0.15)\n"
        "print(s.schedule()[2])"
    )

    assert fake.run(program).split() == ["7", "6", "2", "16"]


def test_unknown_release_is_left_alone(tmp_path: Path) -> None:
    """A release that nobody has read keeps its limits, and the log says so."""
    fake = Fake(tmp_path, version="0.77.0")
    fake.lease(max_running=2)
    said = fake.run(f"register()\n{IMPORT}print(Scheduler().schedule())")

    assert "('scheduled', False, 16)" in said
    assert "0.77.0 is not known" in said


@pytest.mark.parametrize(
    "scheduler",
    ["", "class Scheduler: pass", "class Scheduler:\n    def schedule(self): return 'alive'"],
    ids=["nothing", "other", "bare"],
)
def test_other_shapes_do_not_break_the_host(tmp_path: Path, scheduler: str) -> None:
    """A module that is not as expected is left alone; the program runs on."""
    program = (
        "register()\nfrom vllm.v1.core.sched import scheduler\n"
        "print(getattr(scheduler, 'Scheduler', type('S', (), {}))().schedule() "
        "if hasattr(getattr(scheduler, 'Scheduler', None), 'schedule') else 'alive')"
    )

    assert Fake(tmp_path, scheduler=scheduler).run(program).startswith("alive")


def test_fault_while_limiting_gives_the_own_limit_back(tmp_path: Path) -> None:
    """When the scheduler changes under the agent, it gives up, and the server's own limit is back."""
    fake = Fake(tmp_path)
    fake.lease(max_running=2)
    program = (
        f"register()\n{IMPORT}s = Scheduler(); print(s.schedule()[2])\n"
        "agent = s.__dict__['_kvwatch_agent']; agent._limits.look = None; time.sleep(0.15)\n"
        "print(s.schedule()[2]); print(s.schedule()[2])"
    )

    assert fake.run(program).split()[:3] == ["2", "16", "16"]


def test_state_is_published(tmp_path: Path) -> None:
    """The first step starts the publisher: blocks, tokens, and the data-parallel rank as the engine."""
    import socket

    from kvwatch.wire_datagram import decode

    fake = Fake(tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ears:
        ears.bind(str(tmp_path / "agent.sock"))
        ears.settimeout(10)
        fake.run(f"register()\n{IMPORT}s = Scheduler(); s.schedule(); time.sleep(0.6)")
        found = decode(ears.recv(20_000)).state

    assert found.engine == "3"
    assert found.kv is not None
    assert (found.kv.num_blocks, found.kv.used_blocks, found.kv.free_blocks) == (8, 4, 4)
    assert (found.kv.tokens, found.blocks_held, found.kv.block_size_tokens) == (50, 4, 16)
    assert found.scheduler is not None
    assert (found.scheduler.running, found.scheduler.waiting, found.scheduler.max_running) == (1, 0, 16)
    assert found.limits == "obeyed"


@pytest.mark.parametrize("version", ["0.9.2", "0.24.0", "0.32.0", "0.32.0+cpu", "0.33.1rc1"])
def test_known_releases(version: str) -> None:
    """Releases that were read are limited."""
    assert refusal(version) == ""


@pytest.mark.parametrize("version", ["0.8.5", "0.34.0", "1.0.0", "dev", "unknown", ""])
def test_unknown_releases(version: str) -> None:
    """All others are refused with a reason that names them."""
    assert version in refusal(version)
