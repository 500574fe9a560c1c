"""Servers are recognised by command line; their workers and strangers are not taken for servers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvwatch.sources.discovery import Process, candidates

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
