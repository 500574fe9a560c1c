"""Agents' datagrams: who may say what, over a real socket and with real processes."""

from __future__ import annotations

import os
import random
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvwatch.sources import agents
from kvwatch.sources.agents import AgentSocket, Heard, Refusal, Registry, Sender
from kvwatch.sources.base import SourceError
from kvwatch.wire_record import MAX_BYTES
from tests.agent.build import agent, allocator, encode
from tests.harness import ROOT

ALICE = Sender(pid=100, uid=1000)
KEY = "agent/chat/0/0"


class Proc:
    """A made /proc: when processes began, and what they call themselves inside their namespaces."""

    def __init__(self) -> None:
        self.starts: dict[int, int] = {100: 1, 200: 2, 300: 3}
        self.inside: dict[int, tuple[int, ...]] = {}

    def registry(self, *servers: str, own_uid: int = 990) -> Registry:
        registry = Registry(
            started=self.starts.get, namespace_pids=lambda pid: self.inside.get(pid, ()), own_uid=own_uid
        )
        registry.servers = frozenset(servers or ("chat",))
        return registry


@pytest.fixture
def proc() -> Proc:
    return Proc()


def content(sender: Sender = ALICE, **change: object) -> bytes:
    return encode(agent(**{"pid": sender.pid} | change), 50.0)


def refused(registry: Registry) -> dict[str, int]:
    return {kind.value: count for kind, count in registry.refused.items() if count}


def test_accepted(proc: Proc) -> None:
    """A datagram of the process it names is a sample of its rank, as old as it says."""
    heard = proc.registry().take(content(), ALICE, 50.5)

    assert heard is not None
    assert heard.key == KEY
    assert heard.observed_s == 50.0
    assert heard.state == agent(pid=100)


def test_foreign_clock_counts_from_arrival(proc: Proc) -> None:
    """A sender in another time namespace is as old as its arrival."""
    for now_s in (10.0, 5000.0):
        heard = proc.registry().take(content(), ALICE, now_s)
        assert heard is not None
        assert heard.observed_s == now_s


def test_claiming_another_pid(proc: Proc) -> None:
    """Whoever names a pid that is not its own changes nothing."""
    registry = proc.registry()

    assert registry.take(content(pid=200), ALICE, 50.0) is None
    assert refused(registry) == {"pid": 1}


def test_pid_of_a_container(proc: Proc) -> None:
    """A process in a pid namespace of its own names the pid it knows; the one known here is kept."""
    proc.inside[100] = (100, 7)
    heard = proc.registry().take(content(pid=7), ALICE, 50.0)

    assert heard is not None
    assert heard.state.pid == 100


@pytest.mark.parametrize("sender", [None, Sender(pid=0, uid=0), Sender(pid=-1, uid=0)])
def test_anonymous(proc: Proc, sender: Sender | None) -> None:
    """Without a pid that means something here nothing is believed."""
    registry = proc.registry()

    assert registry.take(content(), sender, 50.0) is None
    assert refused(registry) == {"anonymous": 1}


def test_another_user(proc: Proc) -> None:
    """Once a server speaks as one user, another user is not heard for it; root and kvwatch's own user are."""
    registry = proc.registry()
    registry.take(content(rank=0), ALICE, 50.0)
    bob, root, own = Sender(pid=200, uid=1001), Sender(pid=300, uid=0), Sender(pid=300, uid=990)

    assert registry.take(content(bob, rank=1), bob, 51.0) is None
    assert refused(registry) == {"uid": 1}
    assert registry.take(content(root, rank=2), root, 51.0) is not None
    assert registry.take(content(own, rank=3), own, 51.0) is not None


def test_replayed(proc: Proc) -> None:
    """A number that is not above the last one of the same process changes nothing."""
    registry = proc.registry()
    registry.take(content(seq=5), ALICE, 50.0)

    assert registry.take(content(seq=5), ALICE, 51.0) is None
    assert registry.take(content(seq=4), ALICE, 52.0) is None
    assert registry.take(content(seq=6), ALICE, 53.0) is not None
    assert refused(registry) == {"replayed": 2}


def test_pid_reuse(proc: Proc) -> None:
    """A new process under an old pid begins again with its own numbers."""
    registry = proc.registry()
    registry.take(content(seq=500), ALICE, 50.0)
    proc.starts[100] = 99

    assert registry.take(content(seq=1), ALICE, 51.0) is not None


def test_living_process_keeps_its_rank(proc: Proc) -> None:
    """While a rank's process lives and speaks, no other is heard; once it is gone or quiet, one is."""
    registry, other = proc.registry(), Sender(pid=200, uid=1000)
    registry.take(content(), ALICE, 50.0)

    assert registry.take(content(other), other, 51.0) is None
    assert refused(registry) == {"conflict": 1}
    del proc.starts[100]
    assert registry.take(content(other, seq=2), other, 52.0) is not None
    proc.starts[100] = 7
    assert registry.take(content(seq=9), ALICE, 53.0) is None
    assert registry.take(content(seq=10), ALICE, 52.0 + agents.QUIET_S + 1) is not None


def test_two_processes_of_one_rank_are_joined(proc: Proc) -> None:
    """The scheduler of one process and the allocator of another are one state, named by the latter."""
    registry, worker = proc.registry(), Sender(pid=200, uid=1000)
    registry.take(content(allocator=None, gpu_uuid="", seq=40), ALICE, 50.0)
    bare = content(worker, kv=None, scheduler=None, effective_max_running=None, blocks_held=None)
    heard = registry.take(bare, worker, 50.1)

    assert heard is not None
    assert heard.state == agent(pid=200)
    heard = registry.take(content(allocator=None, gpu_uuid="", seq=41), ALICE, 51.0)
    assert heard is not None
    assert (heard.state.pid, heard.state.seq, heard.state.allocator) == (200, 1, allocator())


def test_half_that_has_gone_quiet_is_dropped(proc: Proc) -> None:
    """What a dead worker said is not shown beside what the living scheduler says."""
    registry, worker = proc.registry(), Sender(pid=200, uid=1000)
    bare = content(worker, kv=None, scheduler=None, effective_max_running=None, blocks_held=None)
    registry.take(bare, worker, 50.0)
    heard = registry.take(content(allocator=None, gpu_uuid=""), ALICE, 50.0 + agents.QUIET_S + 1)

    assert heard is not None
    assert heard.state.allocator is None
    assert heard.state.pid == 100


def test_rate(proc: Proc) -> None:
    """One process is heard ten times at once and five times a second, whatever it sends."""
    registry = proc.registry()
    heard = [registry.take(content(seq=1 + n), ALICE, 50.0 + n / 10_000) for n in range(20_000)]

    assert 10 <= sum(one is not None for one in heard) <= 22
    assert registry.refused[Refusal.RATE] >= 19_000


def test_flood_of_one_leaves_the_others_heard(proc: Proc) -> None:
    """A flooding process spends its own budget only."""
    registry, other = proc.registry(), Sender(pid=200, uid=1000)
    for number in range(1000):
        registry.take(b"noise", ALICE, 50.0 + number / 10_000)

    assert registry.take(content(other, rank=1), other, 50.2) is not None


def test_ranks_are_bounded(proc: Proc) -> None:
    """Nobody can make up ranks without end: per process, and for servers that nobody configured."""
    registry = proc.registry()
    for rank in range(200):
        registry.take(content(rank=rank, seq=rank), ALICE, 50.0 + rank)
    assert registry.accepted == agents.MAX_KEYS_EACH

    registry = proc.registry()
    for pid in range(1000, 1200):
        sender = Sender(pid=pid, uid=1000)
        registry.take(content(sender, server=f"made-{pid}"), sender, 50.0)
    assert registry.accepted == agents.MAX_KEYS_UNKNOWN
    assert registry.refused[Refusal.TOO_MANY] > 0


def test_silent_ranks_are_forgotten(proc: Proc) -> None:
    """A rank that has been silent for ten minutes leaves nothing behind."""
    registry = proc.registry()
    registry.take(content(), ALICE, 50.0)

    assert registry.forget(100.0) == []
    assert registry.forget(51.0 + agents.FORGOTTEN_S) == [KEY]
    assert registry.forget(51.0 + agents.FORGOTTEN_S) == []


@pytest.mark.parametrize("seed", range(5))
def test_hostile_bytes_change_nothing(proc: Proc, seed: int) -> None:
    """Mutilated datagrams are counted; what was known stays as it was."""
    registry, chance = proc.registry(), random.Random(seed)
    registry.take(content(seq=1), ALICE, 50.0)
    good = content(seq=2)
    for number in range(300):
        broken = bytearray(good)
        for _ in range(chance.randrange(1, 30)):
            broken[chance.randrange(len(broken))] = chance.randrange(256)
        del broken[chance.randrange(len(broken)) :]
        assert registry.take(bytes(broken), ALICE, 50.0 + number) is None

    assert refused(registry) == {"malformed": 300}
    assert registry.take(good, ALICE, 400.0) is not None


# With a real socket


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[AgentSocket]:
    found = agents.create(tmp_path / "agent.sock")
    found.registry.servers = frozenset({"chat"})
    yield found
    found.close()


def send(path: Path, *contents: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(str(path))
        for one in contents:
            sender.send(one)


def own(**change: object) -> bytes:
    return encode(agent(**{"pid": os.getpid()} | change), time.monotonic())


def listen(listening: AgentSocket) -> list[Heard]:
    return listening.receive(2.0)


def test_real_datagram(listening: AgentSocket) -> None:
    """The kernel's credentials of this process let it speak for itself."""
    send(listening.path, own())

    assert [heard.key for heard in listen(listening)] == [KEY]


def test_nothing_said(listening: AgentSocket) -> None:
    """Without datagrams it returns within its deadline."""
    assert listening.receive(0.01) == []


def test_mode(listening: AgentSocket) -> None:
    """Servers of any user can send; the socket is a socket."""
    mode = listening.path.stat().st_mode

    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o666


def test_forged_credentials(listening: AgentSocket) -> None:
    """Root may forge credentials to the kernel, but what it claims must agree with what it forged."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(str(listening.path))
        other = struct.pack("iII", os.getppid(), os.getuid(), os.getgid())
        try:
            sender.sendmsg([own()], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, other)])
        except PermissionError:
            return  # not root: the kernel itself refuses

    assert listen(listening) == []
    assert refused(listening.registry) == {"pid": 1}


def test_too_large_is_not_cut(listening: AgentSocket) -> None:
    """What is larger than the bound is refused whole, although its beginning would be good."""
    send(listening.path, own() + b" " * MAX_BYTES)

    assert listen(listening) == []
    assert refused(listening.registry) == {"size": 1}


def test_descriptors_are_closed(listening: AgentSocket) -> None:
    """Descriptors that somebody sends along are closed at once."""
    folder = Path("/proc/self/fd")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(str(listening.path))
        before = len(list(folder.iterdir()))
        for number in range(5):
            socket.send_fds(sender, [own(seq=number + 1)], [0, 1, 2])
            listen(listening)
        assert len(list(folder.iterdir())) == before


def test_flood_from_another_process(listening: AgentSocket) -> None:
    """Under a flood from one process (tens of thousands a second) another is heard, and the counts say so."""
    flood = (
        "import socket,sys,time\n"
        "s=socket.socket(socket.AF_UNIX,socket.SOCK_DGRAM);s.connect(sys.argv[1]);end=time.monotonic()+1.0\n"
        "while time.monotonic()<end:\n s.send(b'x'*100)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", flood, str(listening.path)])
    heard: list[Heard] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
        sender.connect(str(listening.path))
        seq = 0
        while process.poll() is None:
            try:
                sender.send(own(seq=seq))
                seq += 1
            except BlockingIOError:
                pass
            heard += listening.receive(0.01)
    process.wait()
    heard += listening.receive(0.01)

    assert heard
    assert listening.registry.refused[Refusal.RATE] > 1000


def test_stale_socket_is_replaced(tmp_path: Path) -> None:
    """What a killed daemon left is taken over; a file that is no socket is not."""
    path = tmp_path / "agent.sock"
    agents.create(path).close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as dead:
        dead.bind(str(path))
    found = agents.create(path)
    send(path, own())
    assert listen(found)
    found.close()
    assert not path.exists()

    path.write_text("mine")
    with pytest.raises(SourceError, match=r"agent\.sock"):
        agents.create(path)
    assert path.read_text() == "mine"


def test_long_path(tmp_path: Path) -> None:
    """A directory whose name is longer than a socket's address may be is no obstacle."""
    folder = tmp_path / ("d" * 120)
    folder.mkdir()
    found = agents.create(folder / "agent.sock")
    try:
        assert (folder / "agent.sock").exists()
    finally:
        found.close()


def test_cannot_listen(tmp_path: Path) -> None:
    """What is in the way is one clear error with the path and what to do; no descriptor stays open."""
    (tmp_path / "file").write_text("")
    (tmp_path / "taken").mkdir()
    (tmp_path / "full").mkdir()
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    for place, fix in (
        ("nowhere/agent.sock", "make the directory"),
        (f"{'n' * 120}/agent.sock", "make the directory"),
        ("file/agent.sock", "make the directory"),
        ("taken", "move it away"),
        (f"full/{'s' * 300}", "set agents.socket"),
    ):
        with pytest.raises(SourceError) as told:
            agents.create(tmp_path / place)
        assert str(told.value).startswith(str(tmp_path / place))
        assert fix in str(told.value)
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before


def test_no_descriptor_left(tmp_path: Path) -> None:
    """Out of descriptors is such an error too, and says where their limit is."""
    program = (
        "import resource, sys\nfrom pathlib import Path\nfrom kvwatch.sources import agents\n"
        "from kvwatch.sources.base import SourceError\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n"
        "try: agents.create(Path(sys.argv[1]))\nexcept SourceError as error: print(error)"
    )
    path = tmp_path / "agent.sock"
    ended = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )

    assert ended.stdout.startswith(f"{path}: cannot listen for agents (Too many open files)")
    assert "LimitNOFILE" in ended.stdout


def test_successor_keeps_its_socket(tmp_path: Path) -> None:
    """Closing does not remove the socket that a newer daemon has put in its place."""
    path = tmp_path / "agent.sock"
    first = agents.create(path)
    second = agents.create(path)
    first.close()

    assert path.exists()
    second.close()


def test_own_process() -> None:
    """The kernel's figures of a process are its own: a start, and at least one pid; of none: nothing."""
    assert agents.started(os.getpid()) == agents.started(os.getpid()) is not None
    assert os.getpid() in agents.namespace_pids(os.getpid())
    assert agents.started(2**22 + 1) is None
    assert agents.namespace_pids(2**22 + 1) == ()


def test_every_refusal_is_counted_from_zero(proc: Proc) -> None:
    """Every reason has its count from the start."""
    found = agents.counts(proc.registry())

    assert set(found.values()) == {0}
    assert {"accepted", "rate", "pid", "replayed"} <= found.keys()
