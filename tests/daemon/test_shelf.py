"""The shelf of evidence: bounded, whole files, off the loop, and patient with a disk that takes nothing."""

from __future__ import annotations

import json
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvwatch.catalogue.alert_evidence import name
from kvwatch.daemon import shelf as shelf_module
from kvwatch.daemon.shelf import MAX_FILES, MAX_HELD, MAX_JOBS, MAX_TOTAL_BYTES, Shelf
from kvwatch.model.level import Scope
from tests.daemon.faulty import until

WALL_S = 1_795_996_800.0


def called(number: int) -> str:
    """The name of a piece taken `number` seconds after the first."""
    return name(WALL_S + number, "gpu_lost", Scope(uuid="GPU-1"))


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    made = Shelf(tmp_path / "evidence")
    yield made
    made.close()


def settled(shelf: Shelf) -> None:
    """Wait until everything left so far is done."""
    done = threading.Event()
    while not shelf._offer(done.set):
        pass
    assert done.wait(20)


def files(shelf: Shelf) -> list[str]:
    return sorted(path.name for path in shelf._folder.iterdir())


def test_a_piece_is_written_whole_by_another_thread(shelf: Shelf) -> None:
    """It is made and written outside the caller's thread, mode 0640 in a folder 0750, and told once."""
    makers: list[str] = []

    def make() -> bytes:
        makers.append(threading.current_thread().name)
        return b'{"a":1}'

    shelf.put(called(0), make)
    settled(shelf)
    (path,) = shelf._folder.iterdir()

    assert makers == ["evidence"]
    assert (path.name, path.read_bytes()) == (f"{called(0)}.json", b'{"a":1}')
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert stat.S_IMODE(shelf._folder.stat().st_mode) & 0o027 == 0
    assert [each.name for each in shelf.news()] == [called(0)]
    assert shelf.news() == []
    assert shelf.read(called(0)) == b'{"a":1}'


def test_a_change_replaces_and_tells_nothing(shelf: Shelf) -> None:
    """The minute after goes into the same file; what is not there any more is not made again."""
    shelf.put(called(0), lambda: b"1")
    settled(shelf)
    shelf.news()
    shelf.change(called(0), lambda data: data + b"2")
    shelf.change(called(9), lambda data: data)
    settled(shelf)

    assert shelf.read(called(0)) == b"12"
    assert shelf.names() == [called(0)]
    assert (shelf.news(), shelf.tally().written_total) == ([], 1)


def test_the_oldest_of_too_many_go_first(shelf: Shelf) -> None:
    """Never more than fifty files, and those are the newest."""
    for number in range(MAX_FILES + 7):
        shelf.put(called(number), lambda: b"x")
        assert len(files(shelf) if shelf._folder.exists() else []) <= MAX_FILES + 1  # one may be half written
    settled(shelf)

    assert files(shelf) == [f"{called(number)}.json" for number in range(7, MAX_FILES + 7)]
    assert shelf.names()[0] == called(MAX_FILES + 6)


def test_the_oldest_of_too_large_go_first(shelf: Shelf) -> None:
    """Never more than 20 MiB together, whatever the number."""
    for number in range(25):
        shelf.put(called(number), lambda: b"x" * 2**20)
    settled(shelf)

    assert shelf.tally().size_bytes <= MAX_TOTAL_BYTES
    assert files(shelf) == [f"{called(number)}.json" for number in range(5, 25)]


def test_what_earlier_runs_left_is_there_and_counts(tmp_path: Path) -> None:
    """Pieces of a dead run are listed, read and bounded; half-written files go, strangers stay."""
    folder = tmp_path / "evidence"
    folder.mkdir()
    for number in range(MAX_FILES + 3):
        (folder / f"{called(number)}.json").write_text("{}")
    (folder / f".{called(0)}.json.123").write_text("{")
    (folder / "notes.txt").write_text("mine")
    shelf = Shelf(folder)
    assert len(shelf.names()) == MAX_FILES + 3
    assert shelf.read(called(5)) == b"{}"
    shelf.put(called(1000), lambda: b"new")
    settled(shelf)
    shelf.close()

    assert len(shelf.names()) == MAX_FILES
    assert "notes.txt" in files(shelf)
    assert not [each for each in files(shelf) if each.startswith(".")]


def test_only_names_of_its_own_are_read(shelf: Shelf, tmp_path: Path) -> None:
    """A path to another file is no name, also where the file is there."""
    (tmp_path / "secret.json").write_text("s")
    shelf.put(called(0), lambda: b"x")
    settled(shelf)

    for asked in ("../secret", "/etc/passwd", "", ".", called(1), called(0) + "/../../secret"):
        assert shelf.read(asked) is None


def test_a_file_that_somebody_deleted_is_gone(shelf: Shelf) -> None:
    """It is not there when asked for, and not listed any more."""
    shelf.put(called(0), lambda: b"x")
    settled(shelf)
    (shelf._folder / f"{called(0)}.json").unlink()

    assert shelf.read(called(0)) is None
    assert shelf.names() == []


@pytest.mark.needs("root", "mount")
def test_a_full_disk_loses_nothing_and_is_told_once(tmp_path: Path) -> None:
    """What is on disk stays, what is new is shown from memory, and is written when there is room again."""
    folder = tmp_path / "evidence"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(folder)], check=True)
    try:
        shelf = Shelf(folder)
        shelf.put(called(0), lambda: b"first")
        settled(shelf)
        (folder / "filler").write_bytes(b"x" * 8192)
        for number in (1, 2, 3):
            shelf.put(called(number), lambda n=number: b"%d" % n * 9000)  # type: ignore[misc]
        settled(shelf)
        told = [each.message for each in shelf.news()]
        tally = shelf.tally()
        assert len(told) == 2
        assert "space" in told[1]
        assert (tally.failed_total, tally.unwritten, "space" in tally.problem) == (3, 3, True)
        assert shelf.read(called(2)) == b"2" * 9000
        assert files(shelf) == [f"{called(0)}.json", "filler"]

        subprocess.run(["mount", "-o", "remount,size=1m", str(folder)], check=True)
        shelf.put(called(4), lambda: b"last")
        settled(shelf)
        assert files(shelf) == [*(f"{called(number)}.json" for number in range(5)), "filler"]
        assert (shelf.tally().unwritten, shelf.tally().problem) == (0, "")
        assert len(shelf.news()) == 4
        shelf.close()
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.needs("root", "mount")
def test_a_read_only_directory_shows_what_it_has(tmp_path: Path) -> None:
    """Reading goes on, writing is told once, and memory holds no more than eight pieces."""
    folder = tmp_path / "evidence"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(folder)], check=True)
    try:
        (folder / f"{called(0)}.json").write_text("old")
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        shelf = Shelf(folder)
        for number in range(1, 15):
            shelf.put(called(number), lambda: b"new")
            shelf.change(called(number), lambda data: data + b"er")
        settled(shelf)
        told = [each.message for each in shelf.news()]
        assert (len(told), "Read-only" in told[0]) == (1, True)
        assert shelf.read(called(0)) == b"old"
        assert shelf.read(called(14)) == b"newer"
        assert shelf.tally().unwritten == MAX_HELD
        shelf.close()
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """A file in the folder's place is an error that is told, not one that ends anything."""
    (tmp_path / "evidence").write_text("in the way")
    shelf = Shelf(tmp_path / "evidence")
    shelf.put(called(0), lambda: b"x")
    settled(shelf)
    shelf.close()

    assert len(shelf.news()) == 1
    assert shelf.read(called(0)) == b"x"


def test_a_disk_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving work returns at once, surplus work is counted, and a second reader does not wait at all."""
    monkeypatch.setattr(shelf_module, "READ_S", 0.2)
    folder = tmp_path / "evidence"
    folder.mkdir()
    (folder / f"{called(0)}.json").write_text("old")
    shelf, begun, back = Shelf(folder), threading.Event(), threading.Event()

    def hang() -> bytes:
        """The thread waits in here as it would for a file on a dead mount."""
        begun.set()
        back.wait(20)
        return b"back"

    shelf.put(called(1), hang)
    assert begun.wait(20)
    with pytest.raises(TimeoutError):
        shelf.read(called(0))  # takes one place
    for number in range(MAX_JOBS + 4):
        shelf.put(called(number + 1), lambda: b"x")
    assert shelf.tally().dropped_total == 5
    with pytest.raises(TimeoutError, match="does not answer"):
        shelf.read(called(0))

    back.set()  # the disk answers again
    until(lambda: len(shelf.names()) == MAX_FILES, "the work to be done")
    settled(shelf)
    assert shelf.read(called(MAX_JOBS - 1)) == b"x"
    shelf.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_in_one_piece_does_not_end_the_others(shelf: Shelf) -> None:
    """A bug while one is made is on its way to the log; the next is written."""
    shelf.put(called(0), lambda: json.loads("{"))
    until(lambda: shelf._thread is not None and not shelf._thread.is_alive(), "the thread's end")
    shelf.put(called(1), lambda: b"x")
    settled(shelf)

    assert shelf.names() == [called(1)]
