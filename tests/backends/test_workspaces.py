"""Counters that graphs get: never another graph's, and in memory as long as a graph may replay."""

from __future__ import annotations

import itertools
import weakref

import pytest
import torch
from torch import Tensor

from flashdsa.backends.gpu import workspaces
from flashdsa.backends.gpu.workspaces import Workspace, Workspaces

STREAM = 7


def make(counters: Tensor | None) -> Workspace:
    """A workspace of counters alone."""
    return (torch.zeros(4) if counters is None else counters,)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Workspaces:
    """Two spare counters, and a driver that begins a new capture at each question."""
    captures = itertools.count(1)
    monkeypatch.setattr(workspaces, "capture_id", lambda _: next(captures))
    made = Workspaces()
    made.spare = list(torch.zeros(2, 4))
    return made


def test_counters_of_a_graph_stay_when_later_graphs_are_captured(known: Workspaces) -> None:
    alive = [weakref.ref(x) for x in known.spare]
    addresses = {x.data_ptr() for x in known.spare}
    given = {known.of_capture(STREAM, make)[0].data_ptr() for _ in range(2)}
    assert given == addresses
    for _ in range(3):
        assert known.of_capture(STREAM, make)[0].data_ptr() not in addresses
    assert all(counters() is not None for counters in alive)


def test_launches_of_one_capture_share_a_workspace(
    known: Workspaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspaces, "capture_id", lambda _: 5)
    first = known.of_capture(STREAM, make)
    assert known.of_capture(STREAM, make) is first
    assert known.of_capture(STREAM + 1, make) is not first
