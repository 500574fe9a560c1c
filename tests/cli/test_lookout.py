"""Where no file says what to watch: what starts later is found, strangers are asked less and less."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvwatch.cli import DEFAULT_CONFIG
from kvwatch.cli.lookout import Lookout
from tests.cli.street import Street, llama_pages, only_harmless, shop_pages, vllm_pages
from tests.harness import Daemon


def ports(lookout: Lookout, *answering: str, users: tuple[int, ...] = ()) -> set[str]:
    """The port of every server that a look finds."""
    return {server.url.rpartition(":")[2] for server in lookout.look(answering, users)}


@pytest.fixture
def lookout() -> Lookout:
    """One that looks, as without a file."""
    lookout = Lookout()
    lookout.active = True
    return lookout


def test_a_server_that_starts_later_is_watched(street: Street, tmp_path: Path) -> None:
    """kvwatch starts at boot, minutes before any server has loaded its model: without a file it finds the
    server when it answers, and leaves alone what is none."""
    assert not Path(DEFAULT_CONFIG).exists(), "this test needs a host without a configuration"
    with Daemon(tmp_path / "run") as daemon:
        daemon.until(lambda: daemon.metrics().get("kvwatch_config_last_reload_successful"), 20, "a report")
        before = daemon.state()["servers"]
        _, port = street.open("vllm", "serve", "tiny", "x", pages=vllm_pages())
        shop_pid, _ = street.open("gunicorn", "shop", pages=shop_pages())
        source = f"server/vllm-{port}"
        daemon.until(lambda: daemon.metrics().get("kvwatch_source_up", source=source) == 1, 40, source)
        levels = daemon.metrics().all("kvwatch_rule_level", server=f"vllm-{port}", rule="kv_usage")

    assert f"vllm-{port}" not in {server["server"] for server in before}
    assert levels
    assert street.asked(shop_pid) == []


def test_what_is_watched_already_is_not_asked(street: Street, lookout: Lookout) -> None:
    """A server that answers its polls needs no second reader."""
    pid, port = street.open("vllm", "serve", "tiny", "x", pages=vllm_pages())

    found = ports(lookout, f"http://127.0.0.1:{port}")

    assert str(port) not in found
    assert street.asked(pid) == []


def test_a_stranger_is_asked_less_and_less(street: Street, lookout: Lookout) -> None:
    """A program that merely uses a GPU is asked once, then not again for half a minute; a server whose
    command line tells what it is is asked at every look, as it may be loading its model."""
    stranger, _ = street.open("python", "shop.py", pages=shop_pages())
    loading, port = street.open(
        "/opt/llama.cpp/llama-server", "server", pages={"*": (503, "application/json", "{}")}
    )
    looks = [str(port) in ports(lookout, users=(stranger,)) for _ in range(2)]
    once = len(street.asked(stranger))
    ports(lookout, users=(stranger,))

    assert looks == [False, False]
    assert once == len(street.asked(stranger)) > 0
    assert only_harmless(street.asked(stranger))
    assert len(street.asked(loading)) >= 3


def test_with_a_file_nobody_is_looked_for(street: Street) -> None:
    """The file says what to watch."""
    pid, _ = street.open("/opt/llama.cpp/llama-server", "server", pages=llama_pages())

    assert Lookout().look((), ()) == []
    assert street.asked(pid) == []
