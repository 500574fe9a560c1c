"""Red on a real daemon: a file in the state directory, a page, a link to it, and no harm by a bad disk."""

from __future__ import annotations

import json
import stat
import urllib.request
from pathlib import Path

from kvwatch.catalogue.alerts import ALERTS
from kvwatch.model.level import RuleId
from tests.daemon.faulty import PATIENCE_S, Host, wait_for_gpus
from tests.daemon.test_daemon import ask
from tests.harness import Daemon

LOST = "/evidence/latest?rule=gpu_lost&server=&engine=&uuid={uuid}"


def lose_a_gpu(host: Host, daemon: Daemon) -> str:
    """Let GPU 1 fall off the bus and wait for red; its UUID."""
    wait_for_gpus(daemon)
    host.gpus.error(1, "*", 15).write()
    daemon.until(lambda: daemon.level("gpu_lost", gpu="1") == 2, PATIENCE_S, "red")
    return next(str(gpu["uuid"]) for gpu in daemon.state()["gpus"] if gpu["index"] == 1)


def kept(daemon: Daemon) -> list[Path]:
    folder = daemon.folder / "state" / "evidence"
    return sorted(folder.glob("*.json")) if folder.is_dir() else []


def told(daemon: Daemon) -> list[dict[str, object]]:
    """The events about evidence."""
    events = json.loads(daemon.get("/api/v1/events"))["events"]
    return [event for event in events if event["kind"] == "evidence"]


def test_red_leaves_a_file_and_a_page_that_the_alert_finds(host: Host) -> None:
    """From red to the page: file, event, the link of the alert, the facts; and once over a restart."""
    with host.daemon() as daemon:
        uuid = lose_a_gpu(host, daemon)
        daemon.until(lambda: told(daemon) or None, PATIENCE_S, "the event")
        (path,) = kept(daemon)
        found = json.loads(path.read_text())
        alert = next(a for a in ALERTS if a.rule is RuleId.GPU_LOST)
        link = alert.annotations()["evidence"].replace("{{ $labels.instance }}", f"127.0.0.1:{daemon.port}")
        for name, value in (("server", ""), ("engine", ""), ("uuid", uuid)):
            link = link.replace(f"{{{{ $labels.{name} | urlquery }}}}", value)
        with urllib.request.urlopen(link, timeout=10) as reply:
            at, page = reply.url, reply.read().decode()

        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        assert (found["rule"], found["uuid"], found["alert"]) == ("gpu_lost", uuid, "KvwatchGpuLost")
        assert at == f"{daemon.url}/evidence/{path.stem}"
        assert "GPU 1 on this host is lost" in page
        assert "journalctl -k" in page
        assert "<svg" in page
        assert told(daemon)[0]["fields"] == {"evidence": path.stem}
        assert path.stem in daemon.get("/evidence/")
        assert json.loads(daemon.get(f"/api/v1/evidence/{path.stem}"))["id"] == path.stem
        assert daemon.stop() == 0
        assert json.loads(path.read_text())["after"]["level"] == "red"

        daemon.start()
        daemon.until(lambda: daemon.level("gpu_lost", gpu="1") == 2, PATIENCE_S, "red again")
        daemon.until(lambda: int(daemon.state()["tick"]) > 20, PATIENCE_S, "more ticks")
        assert kept(daemon) == [path]
        assert ask(daemon, LOST.format(uuid=uuid))[0] == 200
    assert "Traceback" not in daemon.log.read_text()


def test_a_directory_that_takes_nothing(host: Host) -> None:
    """One event says why; the loop goes on, the page is there all the same, from memory."""
    (host.folder / "state").mkdir()
    (host.folder / "state" / "evidence").write_text("in the way")
    with host.daemon() as daemon:
        uuid = lose_a_gpu(host, daemon)
        daemon.until(lambda: told(daemon) or None, PATIENCE_S, "the event")
        listed = json.loads(daemon.get("/api/v1/evidence"))

        assert len(told(daemon)) == 1
        assert "evidence stays in memory" in str(told(daemon)[0]["message"])
        assert (listed["failed_total"], listed["unwritten"], listed["written_total"]) == (1, 1, 0)
        assert "is lost" in ask(daemon, LOST.format(uuid=uuid))[1]
        assert ask(daemon, "/-/healthy")[0] == 200
        assert daemon.stop() == 0
    assert "Traceback" not in daemon.log.read_text()


def test_the_demo_s_overload_has_a_curve(tmp_path: Path) -> None:
    """The tour turns red for recomputing; the page shows how usage and tax got there, simulated as it is."""
    with Daemon(tmp_path, None, "--demo", "tour", environment={"TMPDIR": str(tmp_path)}) as daemon:
        daemon.until(lambda: daemon.level("recompute_tax", server="chat") == 2, 60, "red")
        daemon.until(lambda: told(daemon) or None, 10, "the evidence")
        (path,) = tmp_path.glob("kvwatch-demo-*/state/evidence/*-recompute_tax-chat~0~.json")
        found = json.loads(path.read_text())
        status, page = ask(daemon, "/evidence/latest?rule=recompute_tax&server=chat&engine=0&uuid=")
        (engine,) = [track for track in found["curve"]["tracks"] if track["server"] == "chat"]
        usage = [value for value in engine["values"]["kv_usage_ratio"] if value is not None]

        assert status == 200
        assert "spends" in found["cause"]
        assert "everything here is simulated" in page
        assert "Engine time lost to recomputing" in page
        assert (min(usage) < 0.6, max(usage) > 0.9) == (True, True)
        assert len(found["curve"]["t_s"]) >= 10
        assert engine["levels"]["recompute_tax"][-1] == 2
        assert {gpu["ledger"] is not None for gpu in found["facts"]["gpus"]} == {True}
        assert daemon.stop() == 0
