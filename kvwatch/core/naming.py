"""Which GPU does an agent mean? CUDA accepts a UUID cut short; everything here is joined by the whole one."""

from __future__ import annotations

from dataclasses import replace

from kvwatch.model.report import Snapshot
from kvwatch.model.sample import Sample
from kvwatch.model.server import AgentState


def with_whole_uuids(snapshot: Snapshot) -> Snapshot:
    """The snapshot with the GPU of each agent by its whole UUID; the same one where nothing is cut short.

    As in CUDA_VISIBLE_DEVICES (CUDA programming guide): a prefix counts only where it names one GPU.
    """
    if not snapshot.agents or not snapshot.gpus:
        return snapshot
    known = {
        gpu.uuid for sample in snapshot.gpus.values() if sample.value is not None for gpu in sample.value.gpus
    }
    changed = {
        key: _named(sample, sample.value, known)
        for key, sample in snapshot.agents.items()
        if sample.value is not None and sample.value.gpu_uuid and sample.value.gpu_uuid not in known
    }
    return replace(snapshot, agents={**snapshot.agents, **changed}) if changed else snapshot


def _named(sample: Sample[AgentState], state: AgentState, known: set[str]) -> Sample[AgentState]:
    wanted = state.gpu_uuid.lower()
    found = [uuid for uuid in known if uuid.lower().startswith(wanted)]
    return replace(sample, value=replace(state, gpu_uuid=found[0])) if len(found) == 1 else sample
