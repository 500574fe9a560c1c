"""A host on which processes call themselves what they like, accept and say nothing, or say too much."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from kvwatch.cli import default_config, probe
from kvwatch.cli.lookout import LOOK_S, Lookout
from kvwatch.sources import discovery
from tests.cli.street import Street, port_below_the_kernels, vllm_pages
from tests.cli.test_cli import kvwatch
from tests.harness import Daemon

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


class Names:
    """Processes that only have a command line."""

    def __init__(self) -> None:
        self.running: list[subprocess.Popen[bytes]] = []

    def call(self, *argv: bytes) -> int:
        """One more; its pid. It is a `sleep` under another name."""
        process = subprocess.Popen(["bash", "-c", b'exec -a "$0" sleep 600', b" ".join(argv)])
        self.running.append(process)
        end_s = time.monotonic() + 10
        while b"bash" in Path(f"/proc/{process.pid}/cmdline").read_bytes():
            assert time.monotonic() < end_s
            time.sleep(0.01)
        return process.pid

    def close(self) -> None:
        for process in self.running:
            process.kill()
            process.wait(10)


@pytest.fixture
def names() -> Iterator[Names]:
    made = Names()
    yield made
    made.close()


def pouring(chunk: bytes, pause_s: float) -> contextlib.AbstractContextManager[int]:
    """A port where every connection gets a page without end."""

    @contextlib.contextmanager
    def opened() -> Iterator[int]:
        over = threading.Event()
        listening = socket.create_server(("127.0.0.1", port_below_the_kernels()))
        listening.settimeout(0.2)

        def pour(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                connection.settimeout(0.5)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
                while not over.wait(pause_s):
                    connection.sendall(chunk)

        def serve() -> None:
            pours = []
            while not over.is_set():
                with contextlib.suppress(TimeoutError):
                    pours.append(threading.Thread(target=pour, args=(listening.accept()[0],)))
                    pours[-1].start()
            for each in pours:
                if each.ident is not None:
                    each.join(5)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            over.set()
            thread.join(10)
            listening.close()

    return opened()


HOSTILE = [
    b"vllm serve x --port 99999",
    b"vllm serve x --port=0",
    b"vllm serve \x1b[31mred\x1b]0;title\x07 --port 1",
    b"vllm serve a\nb\r\nc --port 2",
    b"vllm serve \xff\xfe\xc3( --port 3",
    b"vllm serve --port " + b"9" * 3500,
    b"vllm serve " + b"x" * 3900 + b" --port 4",
    b"/usr/bin/dcgm-exporter -a :99999",
    b"docker-proxy -host-ip 0.0.0.0 -host-port 99999 -container-ip 127.0.0.1 -container-port 8000",
    b"docker-proxy -host-ip 0 -host-port " + b"9" * 3000 + b" -container-ip 1 -container-port " + b"9" * 900,
]


def test_command_lines_of_any_kind_end_no_probe(names: Names, tmp_path: Path) -> None:
    """Ports that are none, line breaks, escape sequences, bytes that are no text: `probe` says what it can,
    and nothing of it speaks to the terminal; the file it writes is good."""
    for command in HOSTILE:
        names.call(command)
    target = tmp_path / "found.yml"

    told = kvwatch("probe", "--write", str(target), folder=tmp_path, extra={"LD_LIBRARY_PATH": "/nowhere"})
    checked = kvwatch("check", str(target), folder=tmp_path)

    assert (told.returncode, "Traceback" in told.stderr) == (0, False), told.stderr
    assert all(line.isprintable() for line in told.stdout.splitlines())
    assert (checked.returncode, checked.stderr) == (0, "")


def test_what_a_server_calls_its_model_does_not_speak_to_the_terminal(street: Street, tmp_path: Path) -> None:
    """An escape sequence in the name of a model is shown as what it is: nothing."""
    pages = vllm_pages()
    status, kind, page = pages["/metrics"]
    evil = page.replace('model_name="', 'model_name="\x1b]0;owned\x07\u202e')
    assert evil != page
    _, port = street.open("vllm", "serve", "tiny", "x", pages=pages | {"/metrics": (status, kind, evil)})

    told = kvwatch("probe", folder=tmp_path, extra={"LD_LIBRARY_PATH": str(tmp_path)})

    assert str(port) in told.stdout
    assert all(line.isprintable() for line in told.stdout.splitlines())


def test_a_link_that_leads_nowhere_is_no_missing_file(tmp_path: Path) -> None:
    """A reload while the file behind it is replaced must not drop every server that it names."""
    link = tmp_path / "kvwatch.yml"
    link.symlink_to(tmp_path / "nowhere")

    assert default_config(str(link)) == str(link)
    assert default_config(str(tmp_path / "missing.yml")) is None


def test_two_servers_on_one_port_have_two_names() -> None:
    """One on 127.0.0.1 and one on [::1]: neither takes the other's place in the metrics."""
    running = []
    with contextlib.ExitStack() as stack:
        port = port_below_the_kernels()
        for host in ("127.0.0.1", "::1"):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listening = stack.enter_context(socket.socket(family))
            listening.bind((host, port))
            listening.listen()
            listening.set_inheritable(True)
            holder = subprocess.Popen(SLEEP, pass_fds=[listening.fileno()])
            stack.callback(holder.wait, 10)
            stack.callback(holder.kill)
            listening.close()
            running.append(discovery.Process(pid=holder.pid, parent=1, command="vllm serve x"))
        found = list(probe.look_at_servers(running))

    assert [one.settings.name for one in found] == [f"vllm-{port}", f"vllm-ip6-{port}"]
    assert [one.settings.url for one in found] == [f"http://127.0.0.1:{port}", f"http://[::1]:{port}"]


def test_a_look_ends_in_time_and_the_rest_has_its_turn(names: Names) -> None:
    """Whoever was not asked for lack of time is asked first at the next look."""
    clock = count(step=10)  # each question takes ten seconds
    lookout = Lookout(now=lambda: float(next(clock)))
    lookout.active = True
    pids = {names.call(b"vllm serve x --port %d" % port_below_the_kernels()) for _ in range(12)}
    looks = []
    for _ in range(4):
        before = set(lookout._asked)
        lookout.look((), ())
        looks.append(len(set(lookout._asked) - before))

    assert max(looks) <= LOOK_S / 10
    assert pids <= {pid for pid, _ in lookout._asked}


@pytest.mark.parametrize(("chunk", "pause_s"), [(b"x" * 65536, 0.0), (b"x", 0.05)], ids=["flood", "drip"])
def test_a_page_without_an_end_is_no_server(names: Names, chunk: bytes, pause_s: float) -> None:
    """It costs one timeout or one cap."""
    with pouring(chunk, pause_s) as port:
        pid = names.call(b"vllm serve x --port %d" % port)
        running = [discovery.Process(pid=pid, parent=1, command=f"vllm serve x --port {port}")]
        (found,) = probe.look_at_servers(running)

    assert found.state is None
    assert "within" in found.problem or "does not end" in found.problem


def test_many_that_never_answer_hold_up_no_start_no_reload_and_no_stop(
    names: Names, street: Street, tmp_path: Path
) -> None:
    """Each costs a whole timeout: thirty took half a minute, five hundred seven. kvwatch starts, answers a
    flood of SIGHUPs without losing the server that does answer, and stops."""
    _, port = street.open("vllm", "serve", "tiny", "x", pages=vllm_pages())
    with contextlib.ExitStack() as stack:
        for _ in range(30):
            listening = stack.enter_context(socket.create_server(("127.0.0.1", port_below_the_kernels())))
            names.call(b"vllm serve x --port %d" % listening.getsockname()[1])
        with Daemon(tmp_path / "run") as daemon:
            source = f"server/vllm-{port}"
            daemon.until(lambda: daemon.metrics().get("kvwatch_source_up", source=source) == 1, 20, source)
            for _ in range(200):
                daemon.signal(signal.SIGHUP)
            daemon.until(lambda: "configuration loaded" in daemon.log.read_text(), 20, "a reload")
            watched = [server["server"] for server in daemon.state()["servers"]]
            status = daemon.stop()

    assert f"vllm-{port}" in watched
    assert status == 0
