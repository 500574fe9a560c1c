"""The entry point of vLLM's plugin group `vllm.general_plugins`: does nothing unless KVWATCH_SERVER is set.

vLLM calls `register` in every one of its processes, some more than once. Only the classes that matter
are wrapped, when and where they are imported: the scheduler (in the engine core) and the GPU worker.
"""

from __future__ import annotations

import functools
import os
import sys
import time
import types
from typing import Any

from kvwatch.agent.environment import Place, PlaceError, place
from kvwatch.agent.guard import Guard

SCHEDULER = "vllm.v1.core.sched.scheduler"
WORKER = "vllm.v1.worker.gpu_worker"
GUARD = Guard("vllm.kvwatch")  # below vLLM's own logger, so that its handlers and format apply
_MARK = "__kvwatch__"
_AGENT = "_kvwatch_agent"


def register() -> None:
    """What vLLM calls. Never raises."""
    GUARD.run("start", _register, otherwise=None)


def _register() -> None:
    try:
        here = place()
    except PlaceError as error:
        GUARD.log().warning("kvwatch agent: %s", error)
        return
    if here is None:
        return
    from kvwatch.agent.hooks import when_imported

    for name, wrap in ((SCHEDULER, _wrap_scheduler), (WORKER, _wrap_worker)):
        what = f"use {name}, which is not as expected"
        when_imported(name, functools.partial(GUARD.run, what, wrap, here, otherwise=None))


def _wrap_scheduler(here: Place, module: types.ModuleType) -> None:
    """Put the agent's step before `Scheduler.schedule`; subclasses inherit it."""
    target: Any = module.Scheduler
    original = target.schedule
    if getattr(original, _MARK, False):
        return
    monotonic, guarded = time.monotonic, GUARD.run

    @functools.wraps(original)
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        agent = self.__dict__.get(_AGENT)
        if agent is not None:
            undo = functools.partial(_give_up, self, agent)
            guarded("limit this scheduler", agent.before_step, self, monotonic(), otherwise=None, mend=undo)
        elif _AGENT not in self.__dict__:
            self.__dict__[_AGENT] = None
            guarded("attach to this scheduler", _attach, here, self, otherwise=None)
        return original(self, *args, **kwargs)

    setattr(schedule, _MARK, True)
    target.schedule = schedule
    _load()


def _load() -> None:
    """Import the rest while the server starts, so that no step has to."""
    import kvwatch.agent.limits
    import kvwatch.agent.publisher
    import kvwatch.agent.torch_memory
    import kvwatch.agent.vllm_scheduler  # noqa: F401


def _attach(here: Place, scheduler: Any) -> None:
    """At a scheduler's first step: its agent, and the publisher of this process."""
    from kvwatch.agent.limits import Limits
    from kvwatch.agent.vllm_scheduler import SchedulerAgent, refusal

    version = _version()
    index = engine_index(scheduler.vllm_config)
    limits = Limits(here.lease, here.server)
    agent = SchedulerAgent(
        scheduler, limits, server=here.server, engine=index, pid=os.getpid(), version=version
    )
    scheduler.__dict__[_AGENT] = agent
    agent.before_step(scheduler, time.monotonic())
    process = _process(here, index, 0)
    process.engine = agent.read
    process.start()
    why = refusal(version)
    if why:
        GUARD.log().warning("kvwatch agent: publishes as %s, refuses limits: %s", here.server, why)
    else:
        GUARD.log().info("kvwatch agent: publishes as %s, obeys %s", here.server, here.lease)


def _give_up(scheduler: Any, agent: Any) -> None:
    """Back to the server's own limits for good; an agent that cannot even do that is called no more."""
    scheduler.__dict__[_AGENT] = None
    agent.give_up(scheduler)
    scheduler.__dict__[_AGENT] = agent


def engine_index(config: Any) -> int:
    """The data-parallel rank that vLLM's own metrics call "engine"."""
    parallel = config.parallel_config
    index = getattr(parallel, "data_parallel_index", None)
    return int(index if index is not None else getattr(parallel, "data_parallel_rank", 0) or 0)


def _version() -> str:
    return str(getattr(sys.modules.get("vllm"), "__version__", "unknown"))


def _process(here: Place, index: int, rank: int) -> Any:
    """The one publisher of this process, made afresh in a forked child."""
    global _PUBLISHER
    if _PUBLISHER is None or _PUBLISHER[0] != os.getpid():
        from kvwatch.agent.publisher import Publisher
        from kvwatch.agent.torch_memory import TorchMemory

        memory = TorchMemory()
        publisher = Publisher(
            here,
            memory=memory.read,
            rank=rank,
            engine_index=index,
            host=f"vllm {_version()}",
            guard=GUARD,
        )
        _PUBLISHER = os.getpid(), publisher, memory
    return _PUBLISHER[1]


_PUBLISHER: tuple[int, Any, Any] | None = None


def _wrap_worker(here: Place, module: types.ModuleType) -> None:
    """The worker publishes its allocator, and returns unused memory between steps when it is asked to."""
    target: Any = module.Worker
    original = target.execute_model
    if getattr(original, _MARK, False):
        return
    monotonic, guarded = time.monotonic, GUARD.run

    @functools.wraps(original)
    def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        limits = self.__dict__.get(_AGENT)
        if limits is None and _AGENT not in self.__dict__:
            self.__dict__[_AGENT] = None
            limits = guarded("attach to this worker", _attach_worker, here, self, otherwise=None)
        if limits is not None and monotonic() >= limits.due_s:
            undo = functools.partial(self.__dict__.__setitem__, _AGENT, None)
            guarded("return unused memory", _compact, limits, otherwise=None, mend=undo)
        return original(self, *args, **kwargs)

    setattr(execute_model, _MARK, True)
    target.execute_model = execute_model


def _attach_worker(here: Place, worker: Any) -> Any:
    from kvwatch.agent.limits import Limits

    _process(here, engine_index(worker.vllm_config), int(worker.rank)).start()
    worker.__dict__[_AGENT] = Limits(here.lease, here.server)
    if _PUBLISHER is not None:
        _PUBLISHER[2].weights_bytes = _weights_bytes(worker)
    return worker.__dict__[_AGENT]


def _weights_bytes(worker: Any) -> int | None:
    """What loading the model took on this GPU, as vLLM's own runner measured it."""
    told = getattr(getattr(worker, "model_runner", None), "model_memory_usage", None)
    return int(told) if isinstance(told, int | float) and told > 0 else None


def _compact(limits: Any) -> None:
    limits.look(time.monotonic())
    if limits.take_compaction() and _PUBLISHER is not None and _PUBLISHER[2].compact():
        GUARD.log().info("kvwatch agent: returned unused memory to the device")
