"""The recorded growth of a real H200 is followed in real time."""

from __future__ import annotations

import pytest

from tests.fakes.nvml.playback_check import worst_miss
from tests.sources.gpu.rig import Rig


@pytest.mark.needs("gcc")
def test_peaks_of_recorded_growth_are_not_missed(rig: Rig) -> None:
    """Through the sawtooth before the wall, the 15 s peak stays within 128 MiB of the truth."""
    miss_mib, compared = worst_miss(rig.directory, phase_s=38.0, for_s=26.0)

    assert compared >= 20
    assert miss_mib <= 128
