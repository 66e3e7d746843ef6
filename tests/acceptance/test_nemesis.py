"""A short soak test of three instances, eight partitions and two groups, with a fixed seed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.nemesis import FAULTS, PEACE, plan
from tests.support.servers import ProcessServer
from tests.support.trial import Trial

SEED = int(os.environ.get("TEST_SEED") or "1")


def test_random_faults_lose_nothing_and_explain_every_repeat(
    fresh_server: ProcessServer, tmp_path: Path
):
    planned = plan(SEED, 9.0, every=0.4, lasting=(1.0, 5.0), kinds=FAULTS)
    with Trial(tmp_path, fresh_server, seed=SEED, lease_ttl=3.0) as trial:
        trial.run(planned)
        outcome = trial.finish()
        print(outcome, trial.evidence(outcome))

    assert outcome.wrong() == {}
    assert outcome.report.handled > 500
    assert outcome.checks > 10
    assert len({strike.kind for strike in outcome.strikes}) > 10


@pytest.mark.promise
def test_rolling_operations_repeat_no_message(fresh_server: ProcessServer, tmp_path: Path):
    """Rolling restarts, rebalances, reloads and recycles are no faults and repeat no message."""
    planned = plan(SEED, 4.0, every=0.4, lasting=(0.2, 0.6), kinds=PEACE)
    consumer = {"max_messages": 15}
    with Trial(tmp_path, fresh_server, seed=SEED, lease_ttl=10.0, consumer=consumer) as trial:
        trial.run(planned)
        outcome = trial.finish()
        print(outcome, trial.evidence(outcome))

    assert outcome.wrong() == {}
    assert outcome.report.duplicated == []
    assert outcome.events["worker.crashed"] == outcome.fenced == 0
    assert {strike.kind for strike in outcome.strikes} == set(PEACE)
