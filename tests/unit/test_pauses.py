"""A node that does not answer is left alone for a while, independently of other nodes."""

from __future__ import annotations

import pytest

from streamqd.supervisor.bounded_client import SPENT_SECONDS, NodeBackoff


@pytest.mark.fault("F16")
def test_node_backoff_grows_to_a_bound_and_resets() -> None:
    pauses = NodeBackoff(0.1, 0.35, lambda: 0.5)
    assert not pauses
    ends = [round(pauses.record_silence("a", 10.0) - 10.0, 6) for _ in range(4)]
    assert ends == [0.1, 0.2, 0.35, 0.35]
    assert pauses.is_paused("a", 10.3)
    assert not pauses.is_paused("a", 10.36)
    assert not pauses.is_paused("b", 10.0)
    pauses.record_reply("a")
    assert not pauses
    assert not pauses.is_paused("a", 10.0)
    assert round(pauses.record_silence("a", 20.0), 6) == 20.1


@pytest.mark.fault("F16")
def test_reconnect_jitter_is_half_of_the_pause() -> None:
    assert NodeBackoff(1.0, 1.0, lambda: 0.0).record_silence("a", 0.0) == 0.5
    assert NodeBackoff(1.0, 1.0, lambda: 1.0).record_silence("a", 0.0) == 1.5


def test_unused_nodes_are_forgotten() -> None:
    pauses = NodeBackoff(1.0, 1.0, lambda: 0.5)
    first, second = pauses.record_silence("a", 0.0), pauses.record_silence("b", 2.0)
    assert pauses.pause_end("a") == first
    pauses.forget(first + SPENT_SECONDS + 0.1)
    assert pauses.pause_end("a") == 0.0
    assert pauses.pause_end("b") == second
    assert pauses
