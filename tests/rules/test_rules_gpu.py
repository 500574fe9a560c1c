"""Truth tables of the rules about a GPU's health: lost, missing, Xid events."""

from __future__ import annotations

import pytest

from kvwatch.model.gpu import GpuHealth
from kvwatch.model.level import Level, Reason, RuleId
from kvwatch.model.sample import Failure, FailureKind, SourceStatus
from kvwatch.model.settings import GpuSettings, Settings
from tests.rules.build import UUID, G, R, U, World, Y, gpu


@pytest.mark.parametrize("health", [GpuHealth.LOST, GpuHealth.RESET_REQUIRED])
def test_gpu_lost(health: GpuHealth) -> None:
    """A GPU that fell off the bus or needs a reset is red at once, from the second pass on."""
    world = World(gpus=(gpu(health=health, health_detail="GPU is lost"),))

    assert world.tick(0)[RuleId.GPU_LOST].reason is Reason.TOO_FEW
    verdict = world.tick(1)[RuleId.GPU_LOST]
    assert (verdict.level, verdict.detail) == (R, "GPU is lost")


@pytest.mark.parametrize("health", [GpuHealth.DENIED, GpuHealth.UNKNOWN])
def test_a_gpu_that_cannot_be_read_is_unknown(health: GpuHealth) -> None:
    """Denied or unknown is neither lost nor fine."""
    assert World(gpus=(gpu(health=health),)).run(10)[RuleId.GPU_LOST].level is U


def test_gpu_missing() -> None:
    """A GPU that was there and is gone is red in its own scope."""
    verdict = World(gpus=(gpu(health=GpuHealth.MISSING),)).run(10)[RuleId.GPU_MISSING]

    assert (verdict.level, verdict.scope.uuid) == (R, UUID)


def test_fewer_gpus_than_expected() -> None:
    """A count that is not reached is red for the host, a UUID that nobody has seen in its own scope."""
    world = World(settings=Settings(gpus=GpuSettings(expect_count=2)))
    verdict = world.run(10)[RuleId.GPU_MISSING]
    assert (verdict.level, verdict.value, verdict.scope.uuid) == (R, 1.0, "")
    assert World(settings=Settings(gpus=GpuSettings(expect_count=1))).run(10)[RuleId.GPU_MISSING].level is G
    named = World(settings=Settings(gpus=GpuSettings(expect_uuids=("GPU-1", "GPU-9")))).run(10)
    assert (named[RuleId.GPU_MISSING].level, named[RuleId.GPU_MISSING].scope.uuid) == (R, "GPU-9")


def test_expected_gpus_without_a_driver() -> None:
    """GPUs that are expected on a host without a driver are missing, once that was said twice."""
    no_driver = Failure(kind=FailureKind.NO_DRIVER, message="no driver")
    world = World(
        settings=Settings(gpus=GpuSettings(expect_count=8)),
        gpus=(),
        gpu_samples=False,
        gpu_status=SourceStatus(source="nvml", period_s=1.0, errors_total=2, failure=no_driver),
    )
    assert world.run(10)[RuleId.GPU_MISSING].level is R


@pytest.mark.parametrize(("xid", "level"), [(13, G), (63, Y), (94, Y), (79, R), (119, R)])
def test_gpu_xid(xid: int, level: Level) -> None:
    """Listed events raise yellow or red; others leave it green."""
    world = World(gpus=(gpu(),))
    world.run(0)
    world.gpus = (gpu(xid_events_total=((xid, 1),)),)

    assert world.tick(1)[RuleId.GPU_XID].level is level


def test_gpu_xid_counts_for_ten_minutes() -> None:
    """An event is over after ten minutes and `hold`; a later one counts again; old totals never do."""
    world = World(gpus=(gpu(xid_events_total=((79, 3),)),))
    assert world.run(0)[RuleId.GPU_XID].level is G  # what was there before is history
    world.gpus = (gpu(xid_events_total=((79, 4),)),)
    assert world.tick(1)[RuleId.GPU_XID].level is R
    assert world.tick(600)[RuleId.GPU_XID].level is R
    world.tick(602)
    assert world.tick(632)[RuleId.GPU_XID].level is G
    world.gpus = (gpu(xid_events_total=((79, 5),)),)
    assert world.tick(700)[RuleId.GPU_XID].level is R


def test_gpu_xid_before_the_first_sample_counts_when_it_is_recent() -> None:
    """An event with a time of its own within the window counts although it came before the first sample."""
    state = gpu(xid_events_total=((79, 1),), last_xid=79, last_xid_s=995.0)

    assert World(gpus=(state,)).run(1000)[RuleId.GPU_XID].level is R
