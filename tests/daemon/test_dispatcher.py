"""The dispatcher: it never holds up the loop, never does two things to one target, and gives back."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvwatch.actions.base import Context
from kvwatch.daemon.dispatcher import LANE_LENGTH, Dispatcher
from kvwatch.daemon.giveback import give_back_all
from kvwatch.daemon.outstanding import Outstanding
from kvwatch.model.action import ActionRequest, ActionResult, EventKind, Limit, Outcome
from kvwatch.model.level import Level, RuleId
from tests.actions.build import BOOT, hook, limit_request, restore_request, until
from tests.harness import ROOT


class Shop:
    """A dispatcher with its own folders."""

    def __init__(self, folder: Path, still_wanted: Callable[[ActionRequest], bool] | None = None) -> None:
        self.limits = folder / "limits"
        self.limits.mkdir(exist_ok=True)
        self.state = folder / "state"
        self.state.mkdir(exist_ok=True)
        self.lever = folder / "lever"
        self.context = Context(limits_dir=self.limits, boot_id=BOOT)
        self.outstanding = Outstanding(self.state / "outstanding.json")
        self.dispatcher = Dispatcher(
            self.context,
            self.outstanding,
            still_wanted=still_wanted or (lambda _request: True),
            lane_idle_s=0.2,
        )
        self.results: list[ActionResult] = []

    def take(self, count: int, seconds: float = 10.0) -> list[ActionResult]:
        """Wait for this many results in all."""

        def enough() -> bool:
            self.results += self.dispatcher.finished()
            return len(self.results) >= count

        assert until(enough, seconds), self.results
        return self.results

    def noted(self) -> list[str]:
        """The servers on disk that must be given back."""
        path = self.state / "outstanding.json"
        return [entry["server"] for entry in json.loads(path.read_text())["entries"]] if path.exists() else []


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path)
    yield made
    made.dispatcher.close()


def lever_hook(folder: Path, before: str = "") -> dict[str, object]:
    """A hook whose lever is a file: it holds the limit, or is gone."""
    body = f"""{before}
if [ "$KVWATCH_EVENT" = restore ]; then rm -f {folder}/lever; exit; fi
echo $KVWATCH_MAX_RUNNING > {folder}/lever"""
    return {"argv": (str(hook(folder, body)),), "deadline_s": 5.0}


def test_a_lever_is_noted_on_disk_before_it_is_moved(shop: Shop, tmp_path: Path) -> None:
    """Killed at any moment after this, the next run knows what to give back."""
    params = lever_hook(tmp_path, f"cp {shop.state}/outstanding.json {tmp_path}/seen")
    shop.dispatcher.offer(limit_request(params=params))
    shop.take(1)

    assert shop.results[0].outcome is Outcome.APPLIED
    assert '"server": "chat"' in (tmp_path / "seen").read_text()
    assert shop.lever.read_text() == "24\n"


def test_a_restore_is_forgotten_only_when_it_succeeded(shop: Shop, tmp_path: Path) -> None:
    """A failed give-back stays on the list."""
    params = lever_hook(tmp_path, f'[ "$KVWATCH_EVENT" = limit ] || [ -e {tmp_path}/works ] || exit 1')
    shop.dispatcher.offer(limit_request(params=params))
    shop.dispatcher.offer(restore_request(params=params))
    shop.take(2)
    after_failure = shop.noted()
    (tmp_path / "works").touch()
    shop.dispatcher.offer(restore_request(params=params))
    shop.take(3)

    assert after_failure == ["chat"]
    assert shop.noted() == []
    assert not shop.lever.exists()


def test_a_limit_that_cannot_be_noted_is_not_imposed(shop: Shop, tmp_path: Path) -> None:
    """`act` is refused where giving back cannot be promised (here: the state directory is gone)."""
    params = lever_hook(tmp_path)
    shop.state.rmdir()
    shop.state.write_text("")  # a file in its place: nothing can be written, not even by root
    shop.dispatcher.offer(limit_request(params=params))
    shop.take(1)

    assert shop.results[0].outcome is Outcome.REFUSED
    assert not shop.lever.exists()


def test_a_lease_needs_no_note(shop: Shop) -> None:
    """What ends by itself is not put on the list."""
    shop.dispatcher.offer(limit_request(action="lease"))
    shop.take(1)

    assert (shop.limits / "chat.json").exists()
    assert shop.noted() == []
    assert shop.results[0].self_expiring is True


def test_what_has_recovered_is_skipped_just_before_acting(tmp_path: Path) -> None:
    """The newest report decides, not the one that asked."""
    shop = Shop(tmp_path, still_wanted=lambda _request: False)
    shop.dispatcher.offer(limit_request(params=lever_hook(tmp_path)))
    shop.take(1)
    shop.dispatcher.close()

    assert shop.results[0].outcome is Outcome.SKIPPED_RECOVERED
    assert not shop.lever.exists()
    assert shop.noted() == []


def test_dry_run_touches_nothing(shop: Shop, tmp_path: Path) -> None:
    """Advice is counted, not carried out."""
    shop.dispatcher.offer(limit_request(params=lever_hook(tmp_path), dry_run=True))
    shop.dispatcher.offer(limit_request(action="lease", dry_run=True))
    shop.take(2)

    assert {result.outcome for result in shop.results} == {Outcome.DRY_RUN}
    assert not shop.lever.exists()
    assert list(shop.limits.iterdir()) == []


def test_one_target_is_served_one_at_a_time_in_order_and_others_beside_it(shop: Shop, tmp_path: Path) -> None:
    """A slow hook holds up its own lane alone."""
    slow = {"argv": (str(hook(tmp_path, f"echo + >> {tmp_path}/log; sleep 0.3; echo - >> {tmp_path}/log")),)}
    for _ in range(3):
        shop.dispatcher.offer(limit_request(params=slow))
    shop.dispatcher.offer(
        limit_request(action="lease", target="limit/code", limit=Limit(server="code", max_running=2))
    )
    first = shop.take(1)[0]
    shop.take(4)

    assert first.target == "limit/code"
    assert (tmp_path / "log").read_text().split() == ["+", "-"] * 3


def test_a_full_lane_drops_and_says_so_and_never_waits(shop: Shop, tmp_path: Path) -> None:
    """The loop is never held up by a hook."""
    params = {"argv": (str(hook(tmp_path, "sleep 2")),)}
    started_s = time.monotonic()
    taken = [shop.dispatcher.offer(limit_request(params=params)) for _ in range(LANE_LENGTH + 10)]

    assert time.monotonic() - started_s < 1
    assert LANE_LENGTH <= sum(taken) <= LANE_LENGTH + 1
    dropped = shop.take(9)
    assert all("dropped" in result.detail for result in dropped)


def test_an_unknown_action_and_a_bug_are_outcomes_not_dead_lanes(shop: Shop) -> None:
    """The lane lives on after anything."""
    shop.dispatcher.offer(limit_request(action="nonsense"))
    shop.dispatcher.offer(limit_request(action="exec", params={"argv": ("/bin/true", "\0")}))
    shop.dispatcher.offer(limit_request(action="lease", limit=None))
    shop.dispatcher.offer(limit_request(action="lease"))
    results = shop.take(4)

    assert [result.outcome for result in results] == [
        Outcome.REFUSED, Outcome.FAILED, Outcome.REFUSED, Outcome.APPLIED,
    ]  # fmt: skip


def test_nothing_is_imposed_after_the_stop_has_begun(tmp_path: Path) -> None:
    """A limit under way is broken off, queued ones are skipped, and all is given back."""
    shop = Shop(tmp_path)
    params = lever_hook(tmp_path, '[ "$KVWATCH_EVENT" = restore ] || sleep 1')
    for number in range(4):
        shop.dispatcher.offer(
            limit_request(params=params, limit=Limit(server="chat", max_running=number + 1))
        )
    assert until(lambda: shop.noted() == ["chat"])
    started_s = time.monotonic()
    shop.dispatcher.close()
    took_s = time.monotonic() - started_s
    time.sleep(1.2)  # longer than the hook would have needed

    assert took_s < 5
    assert not shop.lever.exists()
    assert shop.noted() == []
    assert shop.dispatcher.offer(limit_request(params=params)) is False


def test_a_stop_clears_leases_and_waits_for_no_hook_that_hangs(tmp_path: Path) -> None:
    """The stop ends in bounded time, and what could not be given back stays noted."""
    shop = Shop(tmp_path)
    params = lever_hook(tmp_path, '[ "$KVWATCH_EVENT" = limit ] || sleep 60')
    shop.dispatcher.offer(limit_request(params=params))
    shop.dispatcher.offer(limit_request(action="lease", target="limit/code"))
    shop.take(2)
    started_s = time.monotonic()
    shop.dispatcher.close()

    assert time.monotonic() - started_s < 12
    assert list(shop.limits.iterdir()) == []
    assert shop.noted() == ["chat"]


def test_a_notice_under_way_may_finish_at_stop(tmp_path: Path) -> None:
    """A page that is being sent is not cut off."""
    shop = Shop(tmp_path)
    params = {"argv": (str(hook(tmp_path, f"touch {tmp_path}/begun; sleep 0.5; touch {tmp_path}/paged")),)}
    notice = limit_request(
        target="notify/0",
        event=EventKind.RED,
        rule=RuleId.GPU_LOST,
        level=Level.RED,
        limit=None,
        params=params,
    )
    shop.dispatcher.offer(notice)
    assert until((tmp_path / "begun").exists)
    shop.dispatcher.close()

    assert (tmp_path / "paged").exists()


def test_what_an_earlier_run_left_is_given_back(shop: Shop, tmp_path: Path) -> None:
    """Start-up reconciliation: levers and leases of a run that was killed."""
    shop.dispatcher.offer(limit_request(params=lever_hook(tmp_path)))
    shop.dispatcher.offer(limit_request(action="lease", target="limit/code"))
    shop.take(2)
    next_run = Outstanding(shop.state / "outstanding.json")
    problems = give_back_all(shop.context, next_run, longest_s=3.0)

    assert problems == []
    assert not shop.lever.exists()
    assert list(shop.limits.iterdir()) == []
    assert shop.noted() == []


def test_a_hook_that_outlived_its_daemon_is_waited_for_before_giving_back(tmp_path: Path) -> None:
    """Killed while a hook runs: what the hook still does comes before the restore, so the restore wins."""
    shop = Shop(tmp_path)
    lever_hook(tmp_path, '[ "$KVWATCH_EVENT" = restore ] || sleep 1')
    script = (
        "import sys, time; from pathlib import Path; from tests.daemon import test_dispatcher as t\n"
        "shop = t.Shop(Path(sys.argv[1]))\n"
        "shop.dispatcher.offer(t.limit_request(params={'argv': (sys.argv[2],), 'deadline_s': 5.0}))\n"
        "time.sleep(60)\n"
    )
    argv = [sys.executable, "-c", script, str(tmp_path), str(tmp_path / "hook")]
    doomed = subprocess.Popen(argv, cwd=ROOT)
    assert until(lambda: shop.noted() == ["chat"])
    time.sleep(0.2)
    doomed.kill()
    doomed.wait()
    problems = give_back_all(shop.context, Outstanding(shop.state / "outstanding.json"), longest_s=5.0)
    time.sleep(1.2)

    assert problems == []
    assert not shop.lever.exists()


def test_giving_back_and_imposing_the_same_lever_never_overlap(shop: Shop, tmp_path: Path) -> None:
    """A late restore cannot undo the note of a newer limit."""
    body = f"mkdir {tmp_path}/busy || echo overlap >> {tmp_path}/log; sleep 0.3; rmdir {tmp_path}/busy"
    params = lever_hook(tmp_path, body)
    shop.dispatcher.offer(limit_request(params=params))
    shop.take(1)
    restoring = threading.Thread(
        target=give_back_all, args=(shop.context, shop.outstanding), kwargs={"longest_s": 3.0}
    )
    restoring.start()
    time.sleep(0.1)
    shop.dispatcher.offer(limit_request(params=params))
    restoring.join()
    shop.take(2)

    assert not (tmp_path / "log").exists()
    assert shop.noted() == ["chat"]
    assert shop.lever.exists()


def test_lanes_that_have_nothing_to_do_end_and_come_back(shop: Shop) -> None:
    """Targets that a reload removed leave no thread behind."""
    before = threading.active_count()
    for number in range(20):
        shop.dispatcher.offer(limit_request(action="lease", target=f"limit/s{number}"))
    shop.take(20)
    assert until(lambda: threading.active_count() <= before)
    shop.dispatcher.offer(limit_request(action="lease", target="limit/s1"))

    assert shop.take(21)[-1].outcome is Outcome.APPLIED


def test_closing_without_having_acted_is_immediate_and_repeatable(tmp_path: Path) -> None:
    """A daemon that never acted stops at once."""
    shop = Shop(tmp_path)
    started_s = time.monotonic()
    shop.dispatcher.close()
    shop.dispatcher.close()

    assert time.monotonic() - started_s < 1


def test_a_restore_beside_a_program_that_is_still_at_the_lever_is_not_crossed_off(
    shop: Shop, tmp_path: Path
) -> None:
    """What that program does may come after the restore, so it will be repeated."""
    params = lever_hook(tmp_path)
    shop.dispatcher.offer(limit_request(params=params))
    shop.take(1)
    entry = shop.outstanding.entries()[0]
    with Outstanding(shop.state / "outstanding.json").lever(entry, 1.0):
        shop.dispatcher.offer(restore_request(params=params, deadline_s=0.2))
        shop.take(2)

    assert not shop.lever.exists()
    assert shop.noted() == ["chat"]
