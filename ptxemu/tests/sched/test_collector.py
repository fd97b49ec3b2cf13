"""During a run Python's collector looks rarely, and afterwards it is as it was."""

import gc
import weakref

import pytest

from ptxemu.sched.collector import THRESHOLDS, rare_collections


def test_thresholds_and_generations_come_back():
    before, frozen = gc.get_threshold(), gc.get_freeze_count()  # Python 3.12 freezes some itself
    with rare_collections():
        assert gc.get_threshold() == THRESHOLDS
        assert gc.get_freeze_count() > frozen
        with rare_collections():  # a launch that an observer makes
            assert gc.get_threshold() == THRESHOLDS
        assert gc.get_freeze_count() > frozen
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)


def test_what_a_program_froze_stays_frozen():
    gc.freeze()
    frozen = gc.get_freeze_count()
    younger = [[] for _ in range(1000)]  # more than those of the frozen ones that end meanwhile
    try:
        with rare_collections():
            assert frozen - len(younger) < gc.get_freeze_count() <= frozen
        assert frozen - len(younger) < gc.get_freeze_count() <= frozen
    finally:
        gc.unfreeze()


class Knot:
    """Refers to itself, so that only the collector frees it."""

    def __init__(self):
        self.itself = self


def test_what_is_made_inside_and_forgotten_is_gone_behind_it():
    """And is not left among the old objects, which are looked through rarely."""

    @rare_collections()
    def make():
        return weakref.ref(Knot())

    older = weakref.ref(Knot())
    assert make()() is None
    gc.collect()
    assert older() is None  # what is older was only passed over


def test_an_error_brings_them_back_too():
    before = gc.get_threshold()
    with pytest.raises(ValueError), rare_collections():
        raise ValueError
    assert gc.get_threshold() == before


def test_a_collector_that_is_off_stays_off():
    frozen = gc.get_freeze_count()
    gc.disable()
    try:
        with rare_collections():
            assert not gc.isenabled()
            assert gc.get_freeze_count() == frozen
    finally:
        gc.enable()
