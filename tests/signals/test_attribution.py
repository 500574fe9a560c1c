"""Whose process is it?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvwatch.model.gpu import GpuProcess
from kvwatch.model.settings import GIB, MatchSettings, ServerSettings
from kvwatch.signals.attribution import attribute, candidates, port_of
from tests.signals.build import CHAT, GPU, OTHER_GPU, PATTERNS, gpu, process

SECOND = ServerSettings(name="code", kind="vllm", url="http://127.0.0.1:8001")


def _owner(one: GpuProcess, *servers: ServerSettings, beside: tuple[GpuProcess, ...] = ()) -> str:
    state = gpu(0.0, 50 * GIB, [one, *beside])
    found = attribute(candidates(servers, {}), PATTERNS, [state], {}, {})
    return next(owner for process, owner in found.gpus[GPU].processes or () if process.pid == one.pid)


@pytest.mark.parametrize(
    ("command", "ancestors", "expected"),
    [
        ("vllm serve m --port 8001", (), "code"),
        ("vllm serve m --port=8000", (), "chat"),
        ("VLLM::EngineCore", ((10, "vllm serve m --port 8001"),), "code"),
        ("VLLM::Worker_TP0", ((11, "VLLM::EngineCore"), (10, "vllm serve m --port 8000")), "chat"),
        ("vllm serve m --port 9999", (), ""),
        ("vllm serve m", (), ""),
        ("VLLM::EngineCore", (), ""),
        ("python train.py --port 8001", (), ""),
        ("python train.py", ((10, "bash -c 'x --port 8000'"),), ""),
        ("vllm serve m --exporter-port 8001", (), ""),
        ("vllm serve m --port 80010", (), ""),
    ],
)
def test_port_on_a_command_line_of_the_kind_decides(
    command: str, ancestors: tuple[tuple[int, str], ...], expected: str
) -> None:
    """With two servers of a kind, the port beside the kind's pattern decides; nothing else is guessed."""
    assert _owner(process(1, GIB, command, ancestors=ancestors), CHAT, SECOND) == expected


@pytest.mark.parametrize(
    ("command", "expected"),
    [("vllm serve m", "chat"), ("VLLM::EngineCore", "chat"), ("sglang::scheduler", ""), ("", "")],
)
def test_only_server_of_a_kind_gets_its_processes(command: str, expected: str) -> None:
    """One vLLM server is configured: a vLLM process without a port is its own."""
    assert _owner(process(1, GIB, command), CHAT) == expected


def test_another_port_is_another_server_except_behind_a_container() -> None:
    """A wrong port is refused on the host and believed in a container, where ports are mapped."""
    plain = process(1, GIB, "text-generation-launcher --port 80")
    mapped = replace(plain, cgroup="/system.slice/docker-0123.scope")
    server = ServerSettings(name="tgi", kind="tgi", url="http://127.0.0.1:8080")

    assert _owner(plain, server) == ""
    assert _owner(mapped, server) == "tgi"


def test_container_with_another_port_loses_to_the_process_with_the_right_one() -> None:
    """When one process carries the URL's port, a container with another port is not the server."""
    stranger = process(1, GIB, "vllm serve m --port 7000", cgroup="/docker/1")
    right = process(2, GIB, "vllm serve m --port 8000")

    assert _owner(stranger, CHAT, beside=(right,)) == ""


@pytest.mark.parametrize(
    "match",
    [
        MatchSettings(unit="vllm-chat.service"),
        MatchSettings(unit="vllm-chat"),
        MatchSettings(cgroup="vllm-chat"),
        MatchSettings(cmdline="serve llama"),
    ],
    ids=["unit", "unit without suffix", "cgroup", "cmdline"],
)
def test_match_comes_first(match: MatchSettings) -> None:
    """What the configuration says wins over the port on the command line."""
    mine = process(
        1,
        GIB,
        "VLLM::EngineCore",
        unit="vllm-chat.service",
        cgroup="/system.slice/vllm-chat.service",
        ancestors=((9, "vllm serve llama --port 8001"),),
    )

    assert _owner(mine, replace(CHAT, match=match), SECOND) == "chat"


def test_a_server_with_match_gets_nothing_else() -> None:
    """A process that does not match is not the server's, though port and kind fit."""
    strict = replace(CHAT, match=MatchSettings(unit="vllm.service"))

    assert _owner(process(1, GIB, "vllm serve m --port 8000"), strict) == ""


def test_two_servers_that_match_are_told_apart_by_port_or_not_at_all() -> None:
    """Two servers in one unit: the port decides; without one the process is nobody's."""
    both = [replace(one, match=MatchSettings(unit="vllm.service")) for one in (CHAT, SECOND)]
    with_port = process(1, GIB, "vllm serve m --port 8001", unit="vllm.service")

    assert _owner(with_port, *both) == "code"
    assert _owner(replace(with_port, command="VLLM::EngineCore"), *both) == ""


def test_dead_pid_is_nobodys() -> None:
    """A dead process belongs to no server, whatever its name was."""
    assert _owner(process(1, GIB, alive=False), CHAT) == ""


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [(("0",), "chat"), (("1",), ""), ((GPU,), "chat"), (("gpu-1111",), "chat"), (("GPU-2222",), "")],
)
def test_case_C8_gpus_restrict(gpus: tuple[str, ...], expected: str) -> None:
    """A server bound to GPUs (index, UUID or prefix) has no process elsewhere."""
    assert _owner(process(1, GIB), replace(CHAT, gpus=gpus)) == expected


def test_gpus_tell_two_servers_of_a_kind_apart() -> None:
    """Without ports, two servers of a kind on different GPUs are still told apart."""
    servers = candidates([replace(CHAT, gpus=("0",)), replace(SECOND, gpus=("1",))], {})
    states = [
        gpu(0.0, GIB, [process(1, GIB, "VLLM::EngineCore")]),
        gpu(0.0, GIB, [process(2, GIB, "VLLM::EngineCore")], uuid=OTHER_GPU, index=1),
    ]
    found = attribute(servers, PATTERNS, states, {}, {})

    assert found.uuids == {"chat": (GPU,), "code": (OTHER_GPU,)}
    assert [found.gpus[uuid].processes[0][1] for uuid in (GPU, OTHER_GPU)] == ["chat", "code"]  # type: ignore[index]


def test_a_server_of_kind_auto_is_what_it_turned_out_to_be() -> None:
    """Once a page told its kind, an `auto` server's processes are recognised."""
    auto = replace(CHAT, kind="auto")
    states = [gpu(0.0, GIB, [process(1, GIB)])]

    assert attribute(candidates([auto], {}), PATTERNS, states, {}, {}).uuids["chat"] == ()
    assert attribute(candidates([auto], {"chat": "vllm"}), PATTERNS, states, {}, {}).uuids["chat"] == (GPU,)


def test_broken_pattern_matches_nothing() -> None:
    """A pattern that is no regular expression does no harm."""
    found = attribute(candidates([CHAT], {}), {"vllm": ("(",)}, [gpu(0.0, GIB, [process(1, GIB)])], {}, {})

    assert found.uuids["chat"] == ()


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("http://127.0.0.1:8000", 8000),
        ("http://[::1]:8000/metrics", 8000),
        ("https://user:pw@host:9443/x", 9443),
        ("http://host/x:1", 80),
        ("https://host", 443),
        ("nonsense", None),
    ],
)
def test_port_of_a_url(url: str, port: int | None) -> None:
    """The URL's port, or its scheme's."""
    assert port_of(url) == port
