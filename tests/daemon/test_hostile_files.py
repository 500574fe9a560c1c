"""What somebody may lay into kvwatch's own directories: links, pipes, huge files, JSON of any kind."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from kvwatch.daemon import maintenance
from kvwatch.daemon.outstanding import Outstanding
from kvwatch.daemon.paths import DirectoryError, own_folder, replace_file
from kvwatch.daemon.shelf import MAX_FILES, Shelf
from kvwatch.sources.gpu.inventory import Inventory
from tests.daemon.test_shelf import called, files, settled

T = TypeVar("T")


def within(call: Callable[[], T], seconds: float = 10.0) -> T:
    """What comes of a call that must not wait for anybody: its result or its OSError."""
    found: list[T | OSError] = []

    def run() -> None:
        try:
            found.append(call())
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "it waits for ever"
    if isinstance(found[0], OSError):
        raise found[0]
    return found[0]


def huge(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(1 << 40)


LAID: dict[str, Callable[[Path], None]] = {
    "pipe": lambda path: os.mkfifo(path),
    "dangling link": lambda path: path.symlink_to("/nowhere/at/all"),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "folder": lambda path: path.mkdir(),
    "huge file": huge,
}


@pytest.mark.parametrize("laid", LAID)
def test_evidence_that_is_none_is_passed_over(tmp_path: Path, laid: str) -> None:
    """Under the name of a piece, whether it lies there at the start or comes later: the others are shown, new
    ones are written and the oldest go, and nobody reads it."""
    folder = tmp_path / "evidence"
    folder.mkdir()
    for number in range(2, MAX_FILES + 2):
        (folder / f"{called(number)}.json").write_text("{}")
    LAID[laid](folder / f"{called(1)}.json")
    shelf = Shelf(folder)
    shown = shelf.names()
    victim = folder / f"{called(3)}.json"
    victim.unlink()
    LAID[laid](victim)
    with pytest.raises(OSError):
        within(lambda: shelf.read(called(3)))
    for number in range(100, 104):
        shelf.put(called(number), lambda: b"new")
    settled(shelf)
    tally = shelf.tally()
    read = within(lambda: shelf.read(called(103)))
    shelf.close()

    assert shown == [called(number) for number in range(MAX_FILES + 1, 1, -1)]
    assert (tally.problem, tally.unwritten, tally.written_total) == ("", 0, 4)
    assert read == b"new"
    assert {f"{called(number)}.json" for number in range(100, 104)} <= set(files(shelf))


def test_a_half_written_piece_that_cannot_go_hides_no_other(tmp_path: Path) -> None:
    """A folder with the name of a temporary file stays, and is passed over."""
    (tmp_path / f".{called(0)}.json.1").mkdir()
    (tmp_path / f"{called(1)}.json").write_text("{}")

    assert Shelf(tmp_path).names() == [called(1)]


@pytest.mark.parametrize("laid", LAID)
def test_no_file_of_ours_holds_up_a_start(tmp_path: Path, laid: str) -> None:
    """The maintenance switch (read in the loop), the list of levers and the inventory: each is read at once
    or not at all."""
    for name in ("maintenance.json", "outstanding.json", "gpus.json"):
        LAID[laid](tmp_path / name)

    assert within(lambda: [maintenance.read(tmp_path / "maintenance.json")]) == [None]
    assert within(lambda: Outstanding(tmp_path / "outstanding.json")).entries() == []
    assert within(lambda: Inventory(tmp_path / "gpus.json")).known() == ()


@pytest.mark.parametrize("number", ["1" + "0" * 400, "1e999", "[]", "null", '"x"', "{}"])
def test_a_number_that_is_none_ends_nothing(tmp_path: Path, number: str) -> None:
    """Whole numbers beyond every float included: the loop itself reads the maintenance switch."""
    switch, levers = tmp_path / "maintenance.json", tmp_path / "outstanding.json"
    switch.write_text(
        json.dumps({"v": 1, "boot_id": maintenance.boot_id(), "until_wall_s": 1.0})[:-1]
        + f', "until_boot_s": {number}}}'
    )
    entry = '{"server": "a", "action": "lease", "params": {}, "since_wall_s": %s}'
    levers.write_text(f'{{"v": 1, "entries": [{entry % number}]}}')

    assert maintenance.read(switch) is None
    assert len(Outstanding(levers).entries()) <= 1


def test_a_file_is_not_written_through_a_link(tmp_path: Path) -> None:
    """The temporary file's name can be known beforehand."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / f".state.json.{os.getpid()}").symlink_to(precious)
    replace_file(tmp_path / "state.json", "new")

    assert precious.read_text() == "precious"
    assert (tmp_path / "state.json").read_text() == "new"
    assert not (tmp_path / "state.json").is_symlink()


def test_a_folder_in_tmp_must_be_ours_alone(tmp_path: Path) -> None:
    """Anybody can make /tmp/kvwatch-<uid> first, and lay links in it for us to write through."""
    theirs, open_to_all, link = tmp_path / "theirs", tmp_path / "open", tmp_path / "link"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    link.symlink_to(tmp_path)
    made = own_folder(tmp_path / "new")

    assert own_folder(made) == made
    for path in (open_to_all, link):
        with pytest.raises(DirectoryError, match="alone may write"):
            own_folder(path)
    if os.geteuid() == 0:
        theirs.mkdir()
        os.chown(theirs, 54321, 54321)
        with pytest.raises(DirectoryError, match="alone may write"):
            own_folder(theirs)
