"""The CTA's shared memory by the plan's names."""

from flashdsa.dsl.memory import Memory, Region
from flashdsa.dsl.pipeline import Barriers


class PrefillMemory(Memory):
    """Regions and barriers of `PrefillPlan`."""

    queries: Region
    keys: Region
    scales: Region
    histogram: Region
    masks: Region
    maybes: Region
    candidates: Region
    scratch: Region
    samples: Region
    windows: Region
    logged: Region
    fine: Region
    coarse: Region
    received: Region
    above: Region
    own_coarse: Region
    key_full: Barriers
    key_empty: Barriers
    query_full: Barriers
    query_empty: Barriers
    coarse_full: Barriers
    fine_full: Barriers
    received_full: Barriers
