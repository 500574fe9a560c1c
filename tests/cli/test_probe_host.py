"""`kvwatch probe` on a host with inference servers, a dcgm-exporter and a web server that is none of it."""

from __future__ import annotations

import json
from pathlib import Path

from kvwatch.cli import probe
from kvwatch.sources import discovery
from tests.cli.street import Pages, Street, llama_pages, only_harmless, shop_pages, vllm_pages
from tests.cli.test_cli import kvwatch
from tests.fakes.dcgm import uuid_of
from tests.fakes.dcgm.exporter import Board, page
from tests.harness import Daemon


def test_three_are_found_and_the_file_that_is_written_runs(street: Street, tmp_path: Path) -> None:
    """vLLM, llama.cpp and a dcgm-exporter are found, a web server is left alone; `check` accepts the file
    that probe writes, and `run` has both servers up and the GPUs of the exporter on it, unchanged."""
    _, vllm = street.open("vllm", "serve", "tiny", "x", pages=vllm_pages())
    _, llama = street.open("/opt/llama.cpp/llama-server", "server", pages=llama_pages())
    exporter_page = page("4.4", [Board(0), Board(1)]).decode()
    exporter_pages: Pages = {"/metrics": (200, "text/plain", exporter_page)}
    _, exporter = street.open("/usr/bin/dcgm-exporter", "exporter", pages=exporter_pages)
    shop_pid, shop = street.open("gunicorn", "shop", pages=shop_pages())
    target, no_driver = tmp_path / "found.yml", {"LD_LIBRARY_PATH": str(tmp_path)}

    told = kvwatch("probe", "--json", "--write", str(target), folder=tmp_path, extra=no_driver)
    seen = json.loads(told.stdout)
    checked = kvwatch("check", str(target), folder=tmp_path)
    names = {server["name"]: server["problem"] for server in seen["servers"]}

    assert told.returncode == 0
    assert {f"vllm-{vllm}", f"llamacpp-{llama}"} <= names.keys()
    assert names[f"vllm-{vllm}"] is names[f"llamacpp-{llama}"] is None
    assert seen["dcgm_exporter"] == {
        "url": f"http://127.0.0.1:{exporter}/metrics",
        "gpus": [uuid_of(0), uuid_of(1)],
    }
    assert str(shop) not in told.stdout + target.read_text()
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    with Daemon(tmp_path / "run", None, "--config", str(target), environment=no_driver) as daemon:
        for name in (f"vllm-{vllm}", f"llamacpp-{llama}"):
            daemon.until(
                lambda name=name: daemon.metrics().get("kvwatch_source_up", source=f"server/{name}") == 1,
                20,
                f"{name} to be up",
            )
        daemon.until(lambda: len(daemon.metrics().all("kvwatch_gpu_memory_used_bytes")) == 2, 20, "both GPUs")
        reported = {gpu["uuid"]: gpu["reported_by"] for gpu in daemon.state()["gpus"]}
    assert reported == {uuid_of(0): "dcgm_exporter", uuid_of(1): "dcgm_exporter"}
    assert street.asked(shop_pid) == []


def test_gpu_users_without_a_known_name_are_asked_what_they_are(street: Street) -> None:
    """A GPU user that listens is asked for known paths, one at a time: a llama.cpp under another name is
    found, a web application that uses a GPU is asked politely and not listed, others are left alone."""
    llama_pid, llama = street.open("python", "my_model.py", pages=llama_pages())
    shop_pid, shop = street.open("python", "shop.py", pages=shop_pages())
    other_pid, _ = street.open("python", "other.py", pages=shop_pages())
    ours = {llama_pid, shop_pid, other_pid}
    running = [process for process in discovery.processes() if process.pid in ours]

    found = list(probe.look_at_servers(running, users=[llama_pid, shop_pid]))

    assert [(one.settings.name, one.settings.kind, one.pid) for one in found] == [
        (f"llamacpp-{llama}", "llamacpp", llama_pid)
    ]
    assert street.asked(shop_pid), shop
    assert only_harmless(street.asked(shop_pid))
    assert only_harmless(street.asked(llama_pid))
    assert street.asked(shop_pid)[-1].endswith(" /metrics"), "reading it may disturb others: it comes last"
    assert street.asked(other_pid) == []


def test_the_server_above_a_gpu_user_is_the_one_that_is_asked(street: Street) -> None:
    """The process that holds the GPU is often a worker: its parent listens."""
    server_pid, port = street.open("python", "my_model.py", pages=llama_pages())
    processes = [
        discovery.Process(pid=1, parent=0, command="/sbin/init"),
        discovery.Process(pid=server_pid, parent=1, command="python my_model.py"),
        discovery.Process(pid=4194000, parent=server_pid, command="python worker"),
    ]

    found = list(probe.look_at_servers(processes, users=[4194000]))

    assert [(one.settings.url, one.pid) for one in found] == [(f"http://127.0.0.1:{port}", server_pid)]


def test_a_port_that_the_command_line_does_not_tell_is_looked_up(street: Street) -> None:
    """A recognised server is asked where it listens, not at its kind's default."""
    pid, port = street.open("/opt/llama.cpp/llama-server", "server", pages=llama_pages())
    silent = discovery.Process(pid=pid, parent=1, command="llama-server -m model.gguf")

    found = list(probe.look_at_servers([silent]))

    assert [(one.settings.url, one.problem) for one in found] == [(f"http://127.0.0.1:{port}", "")]
