"""The pure parts of the NVML source: windows, pacing, errors, inventory, /proc reading."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwatch.sources.gpu import nvml_errors as errors
from kvwatch.sources.gpu import procfs
from kvwatch.sources.gpu.inventory import Inventory, KnownGpu
from kvwatch.sources.gpu.nvml_lanes import MIB, Cost, Motion, Pace, stretched
from kvwatch.sources.gpu.nvml_processes import merged
from kvwatch.sources.gpu.nvml_view import clock_event_reasons
from kvwatch.sources.gpu.nvml_windows import MemoryWindows, SlidingMax

STEPS = st.lists(st.tuples(st.floats(0, 3), st.integers(0, 1000)), min_size=1, max_size=30)


@settings(deadline=None, max_examples=60)
@given(steps=STEPS, window_s=st.floats(0.5, 20))
def test_sliding_maximum_is_the_maximum(steps: list[tuple[float, int]], window_s: float) -> None:
    """At every moment the sliding maximum equals the maximum over the values still in the window."""
    sliding, now_s, noted = SlidingMax(window_s), 0.0, []
    for wait_s, value in steps:
        now_s += wait_s
        noted.append((now_s, value))
        sliding.add(now_s, value)
        assert sliding.value(now_s) == max(v for at, v in noted if at >= now_s - window_s)


def test_empty_window_has_no_value() -> None:
    """Past the window there is no maximum, and none is made up."""
    sliding = SlidingMax(10)
    sliding.add(0, 5)

    assert sliding.value(10) == 5
    assert sliding.value(10.1) is None


def test_hidden_is_the_peak_less_the_present_value() -> None:
    """What a 15 s reader misses counts the last 15 s only, whatever the peak window is."""
    windows = MemoryWindows(60)
    windows.add(0, 100, 7)
    windows.add(10, 40, 60)

    assert windows.hidden_bytes(10, 30) == 70
    assert windows.hidden_bytes(20, 30) == 10
    assert (windows.used_peak_bytes(20), windows.free_low_bytes(20)) == (100, 7)


@settings(deadline=None)
@given(cost_s=st.floats(0, 10), wanted_s=st.sampled_from([0.01, 0.1, 1.0]))
def test_interval_keeps_the_budget_or_is_the_slowest(cost_s: float, wanted_s: float) -> None:
    """An interval is never under the wanted one, and 5 % of it pays for the calls, up to the slowest."""
    interval_s = stretched(cost_s, wanted_s, 1.0)

    assert wanted_s <= interval_s <= 1.0
    assert interval_s == 1.0 or cost_s <= 0.05 * interval_s * 1.000001


def test_one_slow_call_does_not_slow_a_lane() -> None:
    """The median of a second decides, so a single hiccup changes nothing."""
    cost = Cost()
    for number in range(20):
        cost.took(number / 20, 0.5 if number == 10 else 0.00001)

    assert cost.median_s == 0.00001


def test_slow_calls_wear_off() -> None:
    """Calls that have become fast again bring the wanted interval back within two seconds."""
    pace = Pace(0.2, 2.0)
    for at in (0.0, 2.0, 4.0):
        pace.done(at, at + 0.1)
    assert pace.interval_s == pytest.approx(2.0)
    for number in range(4):
        pace.done(6 + number, 6.001 + number)

    assert pace.interval_s == pytest.approx(0.2)


def test_motion_starts_at_sixteen_mebibytes_and_lasts_ten_seconds() -> None:
    """A drift under 16 MiB is no motion; its sum is."""
    motion = Motion()
    for number, used in enumerate((0, 8 * MIB, 15 * MIB)):
        motion.seen(float(number), used)
    assert motion.until_s == 0.0
    motion.seen(3.0, 16 * MIB)

    assert motion.until_s == 13.0


@pytest.mark.parametrize(
    ("codes", "meaning"),
    [
        ((3, 13, 25, 26, 4, 2), errors.Meaning.CAPABILITY),
        ((15, 16, 28, 999), errors.Meaning.DEVICE),
        ((1, 9, 12, 18, 27, 29), errors.Meaning.LIBRARY),
        ((6, 7, 8, 10, 11, 14, 21, 12345), errors.Meaning.ABSENT),
    ],
)
def test_every_code_has_its_reaction(codes: tuple[int, ...], meaning: errors.Meaning) -> None:
    """The table of return codes is as specified; what is not in it only means "no value now"."""
    assert {errors.meaning(code) for code in codes} == {meaning}


@pytest.mark.parametrize("value", [2**64 - 1, 2**63 - 1, 0x7FFFFFFFFFFFFFF0])
def test_case_D1_blank_values_are_unknown(value: int) -> None:
    """Every 64-bit blank is None, the value just under them is a number."""
    assert errors.known(value) is None
    assert errors.known(0x7FFFFFFFFFFFFFEF) == 0x7FFFFFFFFFFFFFEF


def test_process_in_two_lists_counts_once() -> None:
    """A process with compute and graphics contexts holds its memory once."""
    assert merged([(7, 100, "compute"), (8, 1, "compute"), (7, 100, "graphics")]) == [
        (7, 100, "compute"),
        (8, 1, "compute"),
    ]


def test_clock_event_reasons_are_named() -> None:
    """Each bit has its name; unknown bits have none."""
    assert clock_event_reasons(0x1 | 0x8 | 1 << 40) == ("gpu_idle", "hw_slowdown")


def test_an_inventory_that_cannot_be_read_just_now_is_not_overwritten(tmp_path: Path) -> None:
    """A passing fault of the disk (or no descriptor left) must not forget the GPUs in the file."""
    path = tmp_path / "inventory.json"
    Inventory(path).note([KnownGpu(uuid="GPU-gone", index=0)])
    content = path.read_bytes()
    path.unlink()
    path.mkdir()  # cannot be opened as a file
    inventory = Inventory(path)
    inventory.note([KnownGpu(uuid="GPU-here", index=1)])
    path.rmdir()
    path.write_bytes(content)
    assert [gpu.uuid for gpu in inventory.known()] == ["GPU-here"]

    inventory.note([KnownGpu(uuid="GPU-here", index=1)])
    assert [gpu.uuid for gpu in inventory.known()] == ["GPU-gone", "GPU-here"]
    assert [gpu.uuid for gpu in Inventory(path).known()] == ["GPU-gone", "GPU-here"]


def test_an_inventory_that_was_not_written_is_written_later(tmp_path: Path) -> None:
    """A disk that was full when a GPU was new is tried again, and leaves no half file."""
    path = tmp_path / "state" / "inventory.json"
    (path.parent / "inventory.json.new").mkdir(parents=True)  # in the way of the new file
    inventory = Inventory(path)
    inventory.note([KnownGpu(uuid="GPU-a", index=0)])
    assert not path.exists()
    (path.parent / "inventory.json.new").rmdir()
    inventory.note([KnownGpu(uuid="GPU-a", index=0)])
    assert [gpu.uuid for gpu in Inventory(path).known()] == ["GPU-a"]
    assert [entry.name for entry in path.parent.iterdir()] == ["inventory.json"]


def test_inventory_is_kept(tmp_path: Path) -> None:
    """What was noted is known to the next process, and an unchanged inventory is not written again."""
    path = tmp_path / "inventory.json"
    gpu = KnownGpu(uuid="GPU-a", index=3, name="NVIDIA H200")
    inventory = Inventory(path)
    inventory.note([gpu])
    path.unlink()
    inventory.note([gpu])
    assert not path.exists()
    inventory.note([KnownGpu(uuid="GPU-b", index=1)])

    assert [known.uuid for known in Inventory(path).known()] == ["GPU-b", "GPU-a"]


def test_index_is_pinned_to_the_uuid(tmp_path: Path) -> None:
    """A renumbered GPU keeps its index; a new one never takes an index that is in use."""
    inventory = Inventory(tmp_path / "inventory.json")
    assert [inventory.pinned_index(f"GPU-{n}", n) for n in range(3)] == [0, 1, 2]

    assert inventory.pinned_index("GPU-2", 1) == 2
    assert inventory.pinned_index("GPU-new", 1) == 3


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("/system.slice/vllm.service", "vllm.service"),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/serve.service", "serve.service"),
        ("/system.slice/docker-0123.scope", "docker-0123.scope"),
        ("/system.slice/vllm.service/workers", "vllm.service"),
        ("/", ""),
    ],
)
def test_unit_of_a_cgroup(cgroup: str, unit: str) -> None:
    """The innermost service or scope of the path is the unit."""
    assert procfs.unit_of(cgroup) == unit


def fake_process(
    root: Path, pid: int, *, state: str = "S", parent: int = 1, threads: int = 1, ticks: int = 77
) -> None:
    """Lay out /proc/<pid> as the kernel does, with a name that would upset a careless parser."""
    folder = root / str(pid)
    folder.mkdir(parents=True)
    fields = [state, str(parent), *["0"] * 15, str(threads), "0", str(ticks), "0"]
    (folder / "stat").write_text(f"{pid} (a) b (c)) {' '.join(fields)}\n")
    (folder / "comm").write_text("VLLM::EngineCor\n")
    (folder / "cmdline").write_bytes(b"python3\0-m\0vllm\0" + b"x" * 2000)
    (folder / "cgroup").write_text("1:name=systemd:/old\n0::/system.slice/vllm.service\n")


def test_process_details_come_from_proc(tmp_path: Path) -> None:
    """comm, command cut to 512, cgroup, unit and ancestors up to init are read."""
    fake_process(tmp_path, 50, parent=40)
    fake_process(tmp_path, 40, parent=1)

    alive, ticks, details = procfs.ProcessTable(str(tmp_path), host_pids=True).look(50, 0.0)

    name, command, cgroup, unit, ancestors = details
    assert (alive, ticks, name) == (True, 77, "VLLM::EngineCor")
    assert command.startswith("python3 -m vllm x")
    assert len(command) == 512
    assert (cgroup, unit) == ("/system.slice/vllm.service", "vllm.service")
    assert [pid for pid, _ in ancestors] == [40]


def test_ancestors_are_at_most_eight(tmp_path: Path) -> None:
    """A long chain, or a circle made by pid reuse, ends after eight."""
    fake_process(tmp_path, 10, parent=11)
    fake_process(tmp_path, 11, parent=10)

    details = procfs.ProcessTable(str(tmp_path), host_pids=True).look(10, 0.0)[2]

    assert len(details[4]) == 8


@pytest.mark.parametrize(
    ("state", "threads", "alive"), [("Z", 1, False), ("X", 1, False), ("Z", 5, True), ("D", 1, True)]
)
def test_zombie_is_dead_unless_threads_live(tmp_path: Path, state: str, threads: int, alive: bool) -> None:
    """A zombie holds memory as a dead process does; a leader that ended before its threads lives."""
    fake_process(tmp_path, 60, state=state, threads=threads)

    assert procfs.ProcessTable(str(tmp_path), host_pids=True).look(60, 0.0)[0] is alive


def test_unreadable_proc_is_not_taken_for_death(tmp_path: Path) -> None:
    """Where /proc hides a process that exists, the kernel is asked: hidden is not dead."""
    table = procfs.ProcessTable(str(tmp_path), host_pids=True)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()

    assert table.look(os.getpid(), 0.0)[0] is True
    assert table.look(ended.pid, 0.0)[0] is False


def test_case_F1_foreign_pid_namespace_tells_nothing(tmp_path: Path) -> None:
    """Without the host's pids nothing is called alive or dead, and no name is guessed."""
    fake_process(tmp_path, 70)

    assert procfs.ProcessTable(str(tmp_path), host_pids=False).look(70, 0.0) == (None, None, procfs.NOTHING)


def test_details_are_renewed_and_pid_reuse_is_seen(tmp_path: Path) -> None:
    """A renamed process gets its new name within ten seconds, a reused pid at once."""
    fake_process(tmp_path, 80)
    table = procfs.ProcessTable(str(tmp_path), host_pids=True)
    table.look(80, 0.0)
    (tmp_path / "80" / "comm").write_text("renamed\n")
    assert table.look(80, 5.0)[2][0] == "VLLM::EngineCor"
    assert table.look(80, 11.0)[2][0] == "renamed"
    (tmp_path / "80" / "comm").write_text("other\n")
    stat = (tmp_path / "80" / "stat").read_text()
    (tmp_path / "80" / "stat").write_text(stat.replace(" 77 ", " 99 "))

    assert table.look(80, 12.0)[1:][1][0] == "other"


def test_host_namespace_is_known_by_its_inode(tmp_path: Path) -> None:
    """Only the kernel's first pid namespace, seen through its own /proc, counts as the host's."""
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns" / "pid").symlink_to("pid:[4026532999]")

    assert procfs.in_host_pid_namespace(str(tmp_path)) is False
    assert procfs.in_host_pid_namespace(str(tmp_path / "absent")) is False
