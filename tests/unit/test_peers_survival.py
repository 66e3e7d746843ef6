"""`make bench NAME=survival` evaluates the runs that it recorded."""

from __future__ import annotations

from tests.benchmarks.peers.survival import JOBS, VICTIM, Run, outcome

DIED_NS = 5_000_000_000
MS = 1_000_000


def test_survival_counts_no_loss_if_every_job_ran_once() -> None:
    runs = [Run(number, DIED_NS - 1) for number in range(JOBS) if number != VICTIM]
    runs.append(Run(VICTIM, DIED_NS + 40 * MS))

    assert outcome(runs, DIED_NS) == {
        "jobs": JOBS,
        "never_run": 0,
        "struck_again_s": 0.04,
        "others_done_s": 0.0,
        "twice": 0,
    }


def test_lost_count_excludes_the_struck_message() -> None:
    runs = [Run(number, DIED_NS + number * MS) for number in range(VICTIM)]

    found = outcome(runs, DIED_NS)
    assert found["never_run"] == JOBS - 1 - VICTIM
    assert found["struck_again_s"] is None
    assert found["others_done_s"] == (VICTIM - 1) / 1000


def test_survival_ignores_the_time_of_second_runs() -> None:
    """The time of a second run is ignored.

    Runs count in the order of their records, which may differ from the order of their times.
    """
    runs = [Run(1, DIED_NS + 9 * MS), Run(1, DIED_NS + MS), Run(2, DIED_NS + 2 * MS)]

    found = outcome(runs, DIED_NS)
    assert found["twice"] == 1
    assert found["others_done_s"] == 0.002
