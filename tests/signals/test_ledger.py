"""The memory ledger: parts that add up, and nothing claimed that is not known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.model.gpu import Accounting, GpuMemory, GpuProcess
from kvwatch.model.report import Snapshot
from kvwatch.model.sample import FailureKind
from kvwatch.model.server import AgentState, Basis, Semantics
from kvwatch.model.settings import GIB, MIB, ServerSettings
from kvwatch.model.signal import GpuSignals
from kvwatch.signals.ledger import PARTS, Share, ledger
from tests.signals.build import (
    CHAT,
    FREE_EVICTABLE,
    GPU,
    OTHER_GPU,
    Run,
    agent,
    engine,
    gpu,
    host,
    memory,
    page,
    process,
    settings,
    status,
)


def _parts(signals: GpuSignals) -> dict[str, int]:
    assert signals.ledger is not None
    return {part.part: part.bytes for part in signals.ledger}


def test_full_ledger_of_one_server() -> None:
    """Weights, pool split by usage, the engine's rest, another process, and what nobody holds."""
    run = Run()
    mine, other = process(1, 60 * GIB), process(2, 3 * GIB, "training.py")
    run.tick(
        Snapshot(
            servers={"chat": page(1000.0, engine(0.25, pool_bytes=40 * GIB, weights_bytes=16 * GIB))},
            gpus=host(1000.0, gpu(1000.0, 65 * GIB, [mine, other])),
        ),
        1000.0,
    )

    assert _parts(run.signals.gpus[0]) == {
        "weights": 16 * GIB,
        "kv_used": 10 * GIB,
        "kv_free": 30 * GIB,
        "engine_other": 4 * GIB,
        "other_process": 3 * GIB,
        "dead_process": 0,
        "driver_reserved": 512 * MIB,
        "unattributed": 2 * GIB,
        "free": 80 * GIB - 65 * GIB - 512 * MIB,
    }
    assert run.signals.gpus[0].unattributed_bytes == 2 * GIB
    assert run.signals.gpus[0].ledger_clamped is False
    assert [one.server for one in run.signals.gpus[0].holders or ()] == ["chat", ""]


def _of(servers: dict[str, object], state: object, run: Run | None = None, **more: object) -> GpuSignals:
    run = run or Run()
    snapshot = Snapshot(servers=servers, gpus=host(1000.0, state))  # type: ignore[arg-type]
    run.tick(replace(snapshot, **more), 1000.0)  # type: ignore[arg-type]
    return run.signals.gpus[0]


def test_without_a_pool_size_all_is_the_engines_rest() -> None:
    """What a server does not tell is not guessed: no weights and no KV parts."""
    parts = _parts(_of({"chat": page(1000.0, engine(0.5))}, gpu(1000.0, 60 * GIB, [process(1, 60 * GIB)])))

    assert parts["engine_other"] == 60 * GIB
    assert not {"weights", "kv_used", "kv_free"} & set(parts)


@pytest.mark.parametrize(
    "semantics",
    [replace(FREE_EVICTABLE, basis=Basis.RESERVATION), replace(FREE_EVICTABLE, basis=Basis.SLOTS)],
    ids=["reservation", "slots"],
)
def test_pool_is_split_only_by_occupancy(semantics: Semantics) -> None:
    """Reservations and slots do not say which blocks are used."""
    one = page(1000.0, engine(0.5, pool_bytes=40 * GIB), semantics=semantics)

    assert "kv_used" not in _parts(_of({"chat": one}, gpu(1000.0, 60 * GIB, [process(1, 60 * GIB)])))


def test_stale_page_splits_nothing() -> None:
    """An old page's usage says nothing about this pass."""
    old = page(990.0, engine(0.5, pool_bytes=40 * GIB))

    assert (
        _parts(_of({"chat": old}, gpu(1000.0, 60 * GIB, [process(1, 60 * GIB)])))["engine_other"] == 60 * GIB
    )


def test_v1_has_no_reserved_part() -> None:
    """With v1 accounting the reserve is inside "used" and comes out as unattributed."""
    v1 = GpuMemory(
        total_bytes=80 * GIB,
        used_bytes=GIB,
        free_bytes=79 * GIB,
        accounting=Accounting.V1,
        reserved_bytes=None,
    )
    parts = _parts(_of({}, gpu(1000.0, 0, [], mem=v1)))

    assert "driver_reserved" not in parts
    assert parts["unattributed"] == GIB


def test_unreported_process_size_is_unattributed() -> None:
    """A process without a reported size has no part, not even of 0: its memory is in the coarser one."""
    parts = _parts(_of({}, gpu(1000.0, 10 * GIB, [process(1, None), process(2, 4 * GIB, "x")])))

    assert "engine_other" not in parts
    assert parts["other_process"] == 4 * GIB
    assert parts["unattributed"] == 6 * GIB


def test_unreadable_process_list_leaves_everything_unattributed() -> None:
    """Without a list nothing is said about processes, not even that there are none."""
    parts = _parts(_of({}, gpu(1000.0, 10 * GIB, None)))

    assert set(parts) == {"driver_reserved", "unattributed", "free"}
    assert parts["unattributed"] == 10 * GIB


def test_dead_process_needs_the_hosts_pid_namespace() -> None:
    """Only where pids can be looked up may one be called dead; elsewhere its memory is unattributed."""
    dead = process(9, 5 * GIB, "", alive=False, name="")
    here = _of({}, gpu(1000.0, 5 * GIB, [dead]))
    run = Run()
    run.tick(Snapshot(gpus=host(1000.0, gpu(1000.0, 5 * GIB, [dead]), namespace=False)), 1000.0)
    elsewhere = run.signals.gpus[0]

    assert here.dead_process_bytes == 5 * GIB
    assert elsewhere.dead_process_bytes is None
    assert _parts(elsewhere)["unattributed"] == 5 * GIB


def test_pid_that_cannot_be_looked_up_is_not_called_another_process() -> None:
    """In a foreign pid namespace an unknown pid could be the watched server's."""
    unknown = GpuProcess(pid=9, used_bytes=5 * GIB)
    run = Run()
    run.tick(Snapshot(gpus=host(1000.0, gpu(1000.0, 5 * GIB, [unknown]), namespace=False)), 1000.0)

    assert _parts(run.signals.gpus[0])["other_process"] == 0
    assert _parts(run.signals.gpus[0])["unattributed"] == 5 * GIB


def test_no_ledger_on_a_mig_parent() -> None:
    """The parent's memory is its instances': adding it to theirs would count it twice."""
    signals = _of({}, gpu(1000.0, 10 * GIB, [process(1, GIB)], is_mig_parent=True))

    assert signals.ledger is None
    assert signals.holders is None


def test_pid_listed_twice_is_counted_once() -> None:
    """A process that is listed as compute and as graphics holds its memory once."""
    twice = [process(1, 4 * GIB, "x"), process(1, 4 * GIB, "x", kind="graphics")]

    assert _parts(_of({}, gpu(1000.0, 4 * GIB, twice)))["other_process"] == 4 * GIB


def test_races_are_clamped_and_reported() -> None:
    """Processes that add up to more than is used are cut, and the pass says so."""
    signals = _of({}, gpu(1000.0, 4 * GIB, [process(1, 6 * GIB, "x")]))

    assert _parts(signals)["other_process"] == 4 * GIB
    assert signals.ledger_clamped is True


def test_tensor_parallel_pool_is_on_each_gpu() -> None:
    """One engine on two GPUs has its pool, as reported per GPU, on both."""
    run = Run()
    both = [
        gpu(1000.0, 60 * GIB, [process(1, 60 * GIB)]),
        gpu(1000.0, 60 * GIB, [process(2, 60 * GIB)], uuid=OTHER_GPU, index=1),
    ]
    one = page(1000.0, engine(0.5, pool_bytes=40 * GIB))
    run.tick(Snapshot(servers={"chat": one}, gpus=host(1000.0, *both)), 1000.0)

    assert [_parts(signals)["kv_used"] for signals in run.signals.gpus] == [20 * GIB, 20 * GIB]
    assert run.chat.gpu_uuids == (GPU, OTHER_GPU)


def test_engines_on_one_gpu_add_up() -> None:
    """Two engines on one GPU: both pools, each with its own usage."""
    engines = [engine(0.5, pool_bytes=20 * GIB), engine(0.25, name="1", pool_bytes=20 * GIB)]
    parts = _parts(_of({"chat": page(1000.0, *engines)}, gpu(1000.0, 60 * GIB, [process(1, 60 * GIB)])))

    assert parts["kv_used"] == 15 * GIB
    assert parts["kv_free"] == 25 * GIB


def test_data_parallel_engines_on_several_gpus_need_agents() -> None:
    """Which engine is on which GPU is not guessed; agents tell it."""
    both = [
        gpu(1000.0, 60 * GIB, [process(1, 60 * GIB)]),
        gpu(1000.0, 60 * GIB, [process(2, 60 * GIB)], uuid=OTHER_GPU, index=1),
    ]
    servers = {
        "chat": page(1000.0, engine(0.5, pool_bytes=40 * GIB), engine(0.0, name="1", pool_bytes=40 * GIB))
    }
    agents = agent(1000.0, AgentState(server="chat", engine="0", rank=0, pid=1, seq=1, gpu_uuid=GPU)) | agent(
        1000.0, AgentState(server="chat", engine="1", rank=0, pid=2, seq=1, gpu_uuid=OTHER_GPU)
    )
    blind, told = Run(), Run()
    blind.tick(Snapshot(servers=servers, gpus=host(1000.0, *both)), 1000.0)
    told.tick(Snapshot(servers=servers, gpus=host(1000.0, *both), agents=agents), 1000.0)

    assert all("kv_used" not in _parts(signals) for signals in blind.signals.gpus)
    assert [_parts(signals)["kv_used"] for signals in told.signals.gpus] == [20 * GIB, 0]


def test_two_servers_share_a_gpu() -> None:
    """Each server's memory is split by its own page."""
    second = ServerSettings(name="embed", kind="vllm", url="http://127.0.0.1:8001")
    processes = [process(1, 30 * GIB), process(2, 10 * GIB, "vllm serve e --port 8001")]
    parts = _parts(
        _of(
            {
                "chat": page(1000.0, engine(0.5, pool_bytes=20 * GIB)),
                "embed": page(1000.0, engine(1.0, pool_bytes=4 * GIB), server="embed"),
            },
            gpu(1000.0, 40 * GIB, processes),
            Run(settings(CHAT, second)),
        )
    )

    assert parts["kv_used"] == 14 * GIB
    assert parts["engine_other"] == 16 * GIB


def test_old_pass_is_not_shown_as_new() -> None:
    """When processes have not been read for more than 5 s, there is no ledger, though memory is current."""
    run = Run()
    stale_pass = gpu(1000.0, 10 * GIB, [process(1, GIB)])
    for second in range(8):
        run.gpu(1000.0 + second, replace(stale_pass, memory=memory(10 * GIB)))

    assert run.signals.gpus[0].ledger is None
    assert run.signals.gpus[0].headroom_bytes is not None


def test_no_ledger_of_a_gpu_whose_memory_is_not_told() -> None:
    """A GPU that fails just after its processes were read shows no ledger: it would have no total."""
    run = Run()
    run.gpu(1000.0, gpu(1000.0, GIB, [process(1, GIB)]))
    assert run.signals.gpus[0].ledger is not None
    run.gpu(1000.4, replace(gpu(1000.0, GIB, [process(1, GIB)]), memory=None))

    assert run.signals.gpus[0].ledger is None
    assert run.signals.gpus[0].unattributed_bytes is None


def test_case_F3_pid_that_does_not_resolve_is_unknown_not_zero() -> None:
    """A pid without a process here keeps what the driver says of it; where that is not told, it is no 0."""
    ghost = process(1, 3 * GIB, "", name="", alive=None)
    silent = process(2, None, "", name="", alive=None)
    signals = _of({}, gpu(1000.0, 8 * GIB, [ghost, silent]))

    assert [(one.pid, one.used_bytes) for one in signals.holders or ()] == [(1, 3 * GIB), (2, None)]
    assert signals.dead_process_bytes == 0


def test_case_F3_a_size_that_is_not_told_is_no_part_of_0() -> None:
    """A dead, another's and a server's process without a size: none of these parts is stated as 0."""
    dead = process(7, None, "", name="", alive=False)
    other = process(8, None, "python train.py")
    own = process(9, None)
    silent = _of({}, gpu(1000.0, 8 * GIB, [dead, other, own]))
    partly = _of({}, gpu(1000.0, 8 * GIB, [dead, replace(dead, pid=6, used_bytes=GIB)]))

    assert silent.dead_process_bytes is None
    assert _parts(silent) == {
        "driver_reserved": 512 * MIB,
        "free": 80 * GIB - 8 * GIB - 512 * MIB,
        "unattributed": 8 * GIB,
    }
    assert partly.dead_process_bytes == GIB


def test_case_F6_managed_memory_is_unattributed() -> None:
    """58 GiB used, 5 GiB by processes (managed memory is in none of them): the rest is unattributed."""
    signals = _of({}, gpu(1000.0, 58 * GIB, [process(1, 5 * GIB, "uvm")]))

    assert signals.unattributed_bytes == 53 * GIB
    assert signals.ledger_clamped is False


def test_case_F7_mps_clients_imply_no_quota() -> None:
    """MPS clients are counted by what they hold; headroom is the GPU's, whatever their limits."""
    clients = [process(pid, 2 * GIB, "client", kind="mps") for pid in (1, 2)]
    signals = _of({}, gpu(1000.0, 4 * GIB, clients))

    assert _parts(signals)["other_process"] == 4 * GIB
    assert signals.headroom_bytes == 80 * GIB - 4 * GIB - 512 * MIB


def test_case_F8_orphans_hold_memory_while_the_server_is_down() -> None:
    """The endpoint refuses, its renamed engine process still holds 60 GiB: said with pid and name."""
    orphan = process(77, 60 * GIB, "VLLM::EngineCore", name="VLLM::EngineCor")
    run = Run()
    run.tick(
        Snapshot(
            gpus=host(1000.0, gpu(1000.0, 61 * GIB, [orphan])),
            sources={"server/chat": status(failure=FailureKind.REFUSED)},
        ),
        1000.0,
    )

    assert run.chat.up is False
    assert run.chat.memory_held_while_down_bytes == 60 * GIB
    assert run.chat.gpu_uuids == (GPU,)
    assert [(one.pid, one.name, one.server) for one in run.signals.gpus[0].holders or ()] == [
        (77, "VLLM::EngineCor", "chat")
    ]


def test_nothing_is_held_when_the_processes_are_gone() -> None:
    """Down and gone: zero bytes held, which is known; without a GPU source it is unknown."""
    down = {"server/chat": status(failure=FailureKind.REFUSED)}
    gone, blind = Run(), Run()
    gone.tick(Snapshot(gpus=host(1000.0, gpu(1000.0, 0, [])), sources=down), 1000.0)
    blind.tick(Snapshot(sources=down), 1000.0)

    assert gone.chat.memory_held_while_down_bytes == 0
    assert blind.chat.memory_held_while_down_bytes is None


sizes = st.integers(-(2**40), 2**41)
maybe = st.none() | sizes
found = st.builds(
    GpuProcess,
    pid=st.integers(1, 50),
    used_bytes=maybe,
    alive=st.sampled_from([True, False, None]),
    command=st.sampled_from(["", "x"]),
)


@given(
    memory=st.builds(GpuMemory, total_bytes=sizes, used_bytes=sizes, free_bytes=sizes, reserved_bytes=maybe),
    processes=st.none() | st.lists(st.tuples(found, st.sampled_from(["", "a", "b"])), max_size=6),
    shares=st.dictionaries(
        st.sampled_from(["a", "b"]), st.builds(Share, weights=maybe, pool=maybe, pool_used=maybe)
    ),
    host_pids=st.booleans(),
)
def test_parts_always_add_up_to_the_total(
    memory: GpuMemory,
    processes: list[tuple[GpuProcess, str]] | None,
    shares: dict[str, Share],
    host_pids: bool,
) -> None:
    """Whatever is reported: no part is negative, and together they are exactly the total."""
    book = ledger(memory, processes, shares, host_pids=host_pids)

    assert sum(part.bytes for part in book.parts) == max(0, memory.total_bytes)
    assert all(part.bytes >= 0 for part in book.parts)
    assert {part.part for part in book.parts} <= set(PARTS)
