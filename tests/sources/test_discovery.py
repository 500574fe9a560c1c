"""Servers are recognised by command line; their workers and strangers are not taken for servers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.sources.discovery import DEFAULT_PORTS, Process, candidates, exporter_urls
from kvwatch.sources.listening import Listener, Sockets
from kvwatch.sources.servers import registry

PATTERNS = {"vllm": (r"vllm\.entrypoints", r"VLLM::"), "sglang": (r"sglang\.launch_server",)}


def process(pid: int, command: str, parent: int = 1) -> Process:
    return Process(pid=pid, parent=parent, command=command)


def test_the_port_on_the_command_line_is_used() -> None:
    """`--port 8123` and `--port=8124` name two servers; a third uses its kind's default."""
    found = candidates(
        PATTERNS,
        [
            process(10, "python -m vllm.entrypoints.openai.api_server --port 8123 --model m"),
            process(11, "python -m vllm.entrypoints.openai.api_server --port=8124"),
            process(12, "python -m sglang.launch_server --model m"),
        ],
    )

    assert [(one.kind, one.url) for one in found] == [
        ("vllm", "http://127.0.0.1:8123"),
        ("vllm", "http://127.0.0.1:8124"),
        ("sglang", "http://127.0.0.1:30000"),
    ]


def test_a_servers_workers_are_no_servers() -> None:
    """An engine core below a server, at any depth, is not asked on the default port."""
    found = candidates(
        PATTERNS,
        [
            process(10, "python -m vllm.entrypoints.openai.api_server --port 8123"),
            process(11, "VLLM::EngineCore", parent=10),
            process(12, "sh wrapper", parent=10),
            process(13, "VLLM::Worker", parent=12),
        ],
    )

    assert [one.pid for one in found] == [10]


def test_strangers_are_left_alone() -> None:
    """A web server with a port is not a candidate."""
    assert candidates(PATTERNS, [process(10, "nginx --port 8000"), process(11, "vim vllm.md")]) == []


def test_an_impossible_port_is_no_candidate() -> None:
    """Port 99999 cannot be asked."""
    assert candidates(PATTERNS, [process(10, "python -m vllm.entrypoints x --port 99999")]) == []


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.text(max_size=40)), max_size=9))
def test_any_process_table_is_survived(table: list[tuple[int, int, str]]) -> None:
    """Loops in the parent chain and odd command lines end."""
    rows = [process(pid, f"VLLM:: {text}", parent=parent) for pid, parent, text in table]

    assert len(candidates(PATTERNS, rows)) <= 1 or all(
        one.kind == "vllm" for one in candidates(PATTERNS, rows)
    )


TCP = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
TRIE = "Local:\n   |-- 172.17.0.2\n      /32 host LOCAL\n   |-- 172.17.255.255\n      /32 link BROADCAST\n"


class Proc:
    """A made-up /proc: processes with listening sockets, in network namespace 1 (ours) or another."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._inode = 100
        self._spaces: dict[int, tuple[list[Path], list[str]]] = {}
        (root / "self/ns").mkdir(parents=True)
        (root / "self/ns/net").symlink_to("net:[1]")
        limits = root / "sys/net/ipv4"
        limits.mkdir(parents=True)
        (limits / "ip_local_port_range").write_text("32768\t60999\n")

    def add(self, pid: int, *listening: str, namespace: int = 1) -> None:
        """A process; `listening` are addresses as the kernel writes them, `0100007F:1F40`."""
        folder = self.root / str(pid)
        for name in ("ns", "net", "fd"):
            (folder / name).mkdir(parents=True)
        (folder / "ns/net").symlink_to(f"net:[{namespace}]")
        (folder / "net/fib_trie").write_text(TRIE)
        files, rows = self._spaces.setdefault(namespace, ([], []))
        for number, address in enumerate(listening):
            self._inode += 1
            (folder / f"fd/{number}").symlink_to(f"socket:[{self._inode}]")
            rest = f"00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 {self._inode} 1"
            rows.append(f"   {number}: {address} {rest}\n")
        files.append(folder / "net/tcp")
        for file in files:  # every process shows its whole namespace
            file.write_text(TCP + "".join(rows))

    def sockets(self) -> Sockets:
        return Sockets(self.root)


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    """An empty /proc."""
    return Proc(tmp_path)


VLLM = "python -m vllm.entrypoints.openai.api_server"


def test_the_same_port_on_both_loopbacks_is_two_servers(proc: Proc) -> None:
    """One on 127.0.0.1 and one on [::1]: neither hides the other."""
    proc.add(10, "0100007F:1F40")
    proc.add(11, "00000000000000000000000001000000:1F40")
    found = candidates(
        PATTERNS, [process(10, f"{VLLM} --port 8000"), process(11, VLLM)], sockets=proc.sockets()
    )

    assert [one.url for one in found] == ["http://127.0.0.1:8000", "http://[::1]:8000"]


def test_a_process_that_ends_during_a_look_spoils_it_for_nobody(proc: Proc) -> None:
    """Its tables cannot be read any more; those of the next process are the same namespace's."""
    proc.add(10)
    proc.add(11, "0100007F:2260")
    for name in ("tcp", "tcp6"):
        (proc.root / "10/net" / name).unlink(missing_ok=True)
    found = candidates(PATTERNS, [process(10, VLLM), process(11, VLLM)], sockets=proc.sockets())

    assert [one.url for one in found if one.pid == 11] == ["http://127.0.0.1:8800"]


def test_a_port_that_nobody_can_have_is_not_asked(proc: Proc) -> None:
    """Whoever calls itself docker-proxy may say any number."""
    proc.add(10, "00000000:1F40", namespace=2)
    proxy = "docker-proxy -proto tcp -host-ip 0.0.0.0 -host-port 99999 -container-ip 172.17.0.2 "
    seen = [process(10, "python my_model.py"), process(9, f"{proxy}-container-port 8000")]
    found = candidates(PATTERNS, seen, users=[10], sockets=proc.sockets())

    assert [one.port for one in found if not one.problem] == []


def test_every_engine_has_a_default_port() -> None:
    """Whatever can be recognised by its command line can be asked when that tells no port."""
    assert set(DEFAULT_PORTS) == set(registry.kinds()) - {"auto", "mapped"}


def test_a_container_is_asked_at_the_port_that_docker_publishes(proc: Proc) -> None:
    """A server in a network namespace of its own is asked on loopback at its published port."""
    proc.add(10, "00000000:1F40", namespace=2)
    proxy = "/usr/bin/docker-proxy -proto tcp -host-ip 0.0.0.0 -host-port 9123 -container-ip 172.17.0.2 "
    seen = [process(10, VLLM), process(11, proxy + "-container-port 8000")]

    (found,) = candidates(PATTERNS, seen, sockets=proc.sockets())

    assert (found.url, found.problem) == ("http://127.0.0.1:9123", "")


def test_a_container_without_a_published_port_is_named_and_not_asked(proc: Proc) -> None:
    """Nothing of this host's loopback belongs to it, so nothing is asked; the problem says what to do."""
    proc.add(10, "00000000:1F40", namespace=2)

    (found,) = candidates(PATTERNS, [process(10, VLLM)], sockets=proc.sockets())

    assert "network namespace" in found.problem


def test_a_server_on_another_address_is_named_and_not_asked(proc: Proc) -> None:
    """Probe asks on loopback only: a server that listens on the network alone is the operator's to name."""
    proc.add(10, "0500000A:1F40")

    (found,) = candidates(PATTERNS, [process(10, VLLM)], sockets=proc.sockets())

    assert "10.0.0.5" in found.problem


def test_ports_that_the_kernel_hands_out_are_left_alone(proc: Proc) -> None:
    """What listens there (NCCL, Gloo, ZeroMQ) speaks no HTTP: only ports that were chosen are looked at."""
    proc.add(10, "00000000:9C40", "0100007F:1F41")

    assert proc.sockets().of(10) == (Listener(address="127.0.0.1", port=8001),)
    (found,) = candidates(PATTERNS, [process(10, VLLM)], sockets=proc.sockets())
    assert found.ports == (8001,)


def test_gpu_users_below_a_supervisor_stop_there(proc: Proc) -> None:
    """A GPU user is asked about, and the process that started it; what started both is not."""
    proc.add(20, "00000000:0016")
    proc.add(21, "00000000:1F42")
    proc.add(22)
    seen = [
        process(20, "/usr/sbin/sshd -D"),
        process(21, "python serve.py", parent=20),
        process(22, "python worker.py", parent=21),
    ]

    found = candidates(PATTERNS, seen, users=[22], sockets=proc.sockets())

    assert [(one.kind, one.pid, one.url) for one in found] == [("auto", 21, "http://127.0.0.1:8002")]


def test_dcgm_exporter_is_looked_for_where_it_says(proc: Proc) -> None:
    """Its own address first, then the usual place; a program that only has it as an argument is none."""
    seen = [
        process(10, "/usr/bin/dcgm-exporter -f c.csv -a :9500"),
        process(11, "vim /usr/bin/dcgm-exporter.md"),
    ]

    urls = exporter_urls(seen, proc.sockets())

    assert urls == ["http://127.0.0.1:9500/metrics", "http://127.0.0.1:9400/metrics"]


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("0.0.0.0", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        ("::", "127.0.0.1"),
        ("::ffff:127.0.0.1", "127.0.0.1"),
        ("::1", "[::1]"),
        ("10.0.0.5", None),
        ("fe80::1", None),
    ],
)
def test_which_addresses_answer_on_loopback(address: str, host: str | None) -> None:
    """Wildcards and loopback addresses do; the network's do not."""
    assert Listener(address=address, port=80).host == host
