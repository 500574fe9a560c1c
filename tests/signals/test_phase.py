"""The life of a server and of its GPU."""

from __future__ import annotations

import pytest

from kvwatch.model.report import ShellStatus, Snapshot
from kvwatch.model.sample import FailureKind
from kvwatch.model.settings import GIB, MIB
from kvwatch.model.signal import Phase
from tests.signals.build import (
    MAINTENANCE,
    Run,
    engine,
    gpu,
    host,
    page,
    process,
    status,
)


def _tick(
    run: Run,
    second: float,
    *,
    used: int | None = 60 * GIB,
    failure: FailureKind | None = None,
    generation: int | None = None,
    started: float | None = None,
    shell: ShellStatus | None = None,
) -> None:
    """One second: the GPU's reading, and a good page or a failed poll."""
    now_s = 1000.0 + second
    gpus = {} if used is None else host(now_s, gpu(now_s, used, [process(1, used)] if used else []))
    tokens = int(second) if generation is None else generation
    pages = {} if failure else {"chat": page(now_s, engine(0.5, generation=tokens, started_wall_s=started))}
    run.tick(
        Snapshot(
            servers=pages or ({"chat": run.state.server_samples["chat"]} if run.state.server_samples else {}),
            gpus=gpus,
            sources={"server/chat": status(failure=failure)},
            shell=shell or ShellStatus(),
        ),
        now_s,
    )


def test_server_is_starting_until_its_memory_was_level_for_five_minutes() -> None:
    """Up at once, memory level: starting for 300 s, then steady, and so is its GPU."""
    run = Run()
    for second in range(300):
        _tick(run, second)
        assert run.chat.phase is Phase.STARTING
        assert run.signals.gpus[0].phase is Phase.STARTING
    _tick(run, 300)

    assert run.chat.phase is Phase.STEADY
    assert run.signals.gpus[0].phase is Phase.STEADY


def test_moving_memory_prolongs_the_start() -> None:
    """A move of 64 MiB begins the five minutes anew; less does not."""
    run = Run()
    for second in range(250):
        _tick(run, second, used=60 * GIB + (second % 2) * 60 * MIB)
    for second in range(250, 540):
        _tick(run, second, used=61 * GIB)
        assert run.chat.phase is Phase.STARTING
    for second in range(540, 552):
        _tick(run, second, used=61 * GIB)

    assert run.chat.phase is Phase.STEADY


def test_steady_server_stays_steady_when_memory_moves() -> None:
    """Once settled, growth is what the device rules are there for."""
    run = Run()
    for second in range(302):
        _tick(run, second)
    for second in range(302, 320):
        _tick(run, second, used=60 * GIB + second * 20 * MIB)
        assert run.chat.phase is Phase.STEADY


def test_server_that_never_levels_is_steady_after_half_an_hour() -> None:
    """Endless growth is a leak, not a start: the device rules must not wait for ever."""
    run = Run()
    for second in range(0, 1802, 2):
        _tick(run, second, used=40 * GIB + second * MIB)

    assert run.chat.phase is Phase.STEADY


def test_without_device_memory_the_first_good_page_is_enough() -> None:
    """Where no GPU is visible, a server is steady with its first page."""
    run = Run()
    _tick(run, 0, used=None)

    assert run.chat.phase is Phase.STEADY
    assert run.chat.up is True


@pytest.mark.parametrize(
    ("failure", "phase"),
    [
        (FailureKind.REFUSED, Phase.DOWN),
        (FailureKind.TIMED_OUT, Phase.DOWN),
        (FailureKind.NOT_EXPECTED, Phase.DOWN),
        (FailureKind.UNAUTHORISED, Phase.DOWN),
        (FailureKind.LOADING, Phase.STARTING),
    ],
)
def test_failed_polls_mean_down_or_loading(failure: FailureKind, phase: Phase) -> None:
    """Without a good page the server is not up; one that says that it loads is starting."""
    run = Run()
    _tick(run, 0, used=None, failure=failure)
    _tick(run, 5, used=None, failure=failure)

    assert run.chat.up is False
    assert run.chat.phase is phase
    assert run.chat.down_for_s == 5.0


def test_stuck_poller_knows_nothing() -> None:
    """A poll that hangs says nothing about the server: neither up nor down."""
    run = Run()
    _tick(run, 0, used=None, failure=FailureKind.STUCK)

    assert run.chat.up is None
    assert run.chat.phase is Phase.UNKNOWN


def test_old_page_is_not_up() -> None:
    """When pages stop without an error, up is unknown and no engine figure is shown."""
    run = Run()
    one = Snapshot(servers={"chat": page(1000.0, engine(0.5))}, sources={"server/chat": status()})
    run.tick(one, 1000.0)
    assert run.chat.up is True
    run.tick(one, 1003.1)

    assert run.chat.up is None
    assert run.chat.engines[0].kv_usage_ratio is None
    assert run.chat.engines[0].samples == 1


def test_loading_server_suspends_its_gpus_device_rules() -> None:
    """Refusing connections while its processes' memory grows: starting, for server and GPU."""
    run = Run()
    for second in range(60):
        _tick(run, second, used=(second + 1) * GIB, failure=FailureKind.REFUSED)

    assert run.chat.phase is Phase.STARTING
    assert run.signals.gpus[0].phase is Phase.STARTING


def test_down_server_does_not_suspend_its_gpus_device_rules() -> None:
    """Orphans of a server that went down after steady life: the GPU stays under its rules."""
    run = Run()
    for second in range(302):
        _tick(run, second)
    _tick(run, 302, failure=FailureKind.REFUSED)

    assert run.chat.phase is Phase.DOWN
    assert run.signals.gpus[0].phase is Phase.STEADY
    assert run.signals.gpus[0].phase_detail == "down: chat"


def _settled() -> Run:
    run = Run()
    for second in range(302):
        _tick(run, second, started=5.0)
    return run


def test_counter_reset_is_a_restart() -> None:
    """Counters that went back put the server back to starting and count one restart."""
    run = _settled()
    _tick(run, 302, generation=0)

    assert run.chat.phase is Phase.STARTING
    assert (run.chat.engines[0].samples, run.chat.engines[0].restarts_total) == (1, 1)


def test_new_start_time_is_a_restart() -> None:
    """Another process start time is a restart even when the counters are higher already."""
    run = _settled()
    _tick(run, 302, generation=10**6, started=305.0)

    assert run.chat.engines[0].restarts_total == 1


@pytest.mark.parametrize(("started", "restarts"), [(None, 1), (5.0, 0)], ids=["unknown", "same process"])
def test_refused_connection_is_a_restart_unless_the_process_is_the_same(
    started: float | None, restarts: int
) -> None:
    """After a refused connection a page comes from a new process, unless its start time says otherwise."""
    run = _settled()
    _tick(run, 302, failure=FailureKind.REFUSED)
    _tick(run, 303, started=started)

    assert run.chat.engines[0].restarts_total == restarts


def test_timed_out_polls_are_no_restart() -> None:
    """A slow page is not a new process: the server is steady as soon as it answers again."""
    run = _settled()
    _tick(run, 302, failure=FailureKind.TIMED_OUT)
    assert run.chat.up is False
    _tick(run, 303, started=5.0)

    assert run.chat.phase is Phase.STEADY
    assert run.chat.engines[0].restarts_total == 0


def test_maintenance_is_the_gpus_phase() -> None:
    """In maintenance the GPU's rules rest, and say why."""
    run = _settled()
    _tick(run, 302, shell=MAINTENANCE)

    assert run.signals.gpus[0].phase is Phase.MAINTENANCE
    assert run.chat.phase is Phase.STEADY


def test_gpu_without_a_watched_server_is_under_its_rules() -> None:
    """A GPU that nobody watched uses still has device rules."""
    run = Run()
    shown = run.gpu(1000.0, gpu(1000.0, GIB, [process(1, GIB, "train.py")]))

    assert shown.phase is Phase.STEADY
