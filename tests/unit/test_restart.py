"""A crashed worker restarts immediately after a lone crash, and ever later with broken code."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamqd.model import Backoff
from streamqd.policy.restart import ExitCause, GiveUp, Restart, WorkerExit, decide, history_max

BACKOFF = Backoff(kind="exponential", base=0.5, max=60.0, jitter="none")


def restart_after(
    exits: list[WorkerExit],
    now: float | None = None,
    *,
    backoff: Backoff = BACKOFF,
    crash_loop: int = 5,
    max_crashes: int = 3,
    jitter: float = 1.0,
) -> Restart | GiveUp:
    return decide(
        exits,
        exits[-1].at if now is None and exits else now or 0.0,
        backoff=backoff,
        crash_loop=crash_loop,
        cooldown=60.0,
        max_crashes=max_crashes,
        jitter=jitter,
    )


def boot_exit(at: float) -> WorkerExit:
    return WorkerExit(at, ExitCause.BOOT)


def handling_exit(at: float, lived: float = 0.1, settled: int = 0) -> WorkerExit:
    return WorkerExit(at, ExitCause.HANDLING, lived, settled)


NOW = Restart(0.0)


def test_first_worker_starts_immediately() -> None:
    assert restart_after([]) == NOW


@pytest.mark.parametrize("cause", ExitCause)
@pytest.mark.parametrize("lived", [0.0, 3.0, 1e6])
def test_first_exit_of_any_kind_restarts_immediately(cause: ExitCause, lived: float) -> None:
    assert restart_after([WorkerExit(100.0, cause, lived)]) == NOW


@pytest.mark.fault("F3")
def test_boot_crashes_wait_longer_and_then_open_the_breaker() -> None:
    exits = [boot_exit(float(at)) for at in range(1, 6)]
    assert [restart_after(exits[:count]) for count in range(1, 6)] == [
        NOW,
        Restart(0.5),
        Restart(1.0),
        Restart(2.0),
        GiveUp(5.0 + 60.0),
    ]


def test_restart_wait_counts_from_the_crash() -> None:
    exits = [boot_exit(10.0), boot_exit(20.0), boot_exit(30.0)]
    assert restart_after(exits, now=30.25) == Restart(0.75)
    assert restart_after(exits, now=31.0) == NOW
    assert restart_after(exits, now=99.0) == NOW


def test_restart_waits_are_jittered_and_capped() -> None:
    exits = [boot_exit(0.0), boot_exit(0.0), boot_exit(0.0)]
    policy = Backoff(kind="exponential", base=0.5, max=0.8, jitter="full")
    assert restart_after(exits, backoff=policy, jitter=0.5) == Restart(0.4)


def test_crash_after_the_cooldown_reopens_the_breaker() -> None:
    exits = [boot_exit(float(at)) for at in range(1, 6)]
    assert restart_after(exits, now=64.9) == GiveUp(65.0)
    assert restart_after(exits, now=65.0) == NOW
    assert restart_after([*exits, boot_exit(66.0)]) == GiveUp(126.0)


def test_long_run_resets_the_crash_streak() -> None:
    exits = [boot_exit(float(at)) for at in range(1, 6)]
    well = WorkerExit(200.0, ExitCause.IDLE, lived=30.0)
    assert restart_after([*exits, well]) == NOW
    assert restart_after([*exits, WorkerExit(200.0, ExitCause.IDLE, lived=29.9)]) == GiveUp(260.0)
    # The crash after the long life is the first one of a new streak.
    assert restart_after([*exits, well, boot_exit(201.0)]) == Restart(0.5)


def test_planned_exit_of_a_ready_worker_resets_the_streak() -> None:
    exits = [boot_exit(float(at)) for at in range(1, 6)]
    assert (
        restart_after([*exits, WorkerExit(7.0, ExitCause.ORDERED, lived=1.0), boot_exit(8.0)])
        == NOW
    )


def test_planned_exit_before_ready_is_not_a_crash() -> None:
    exits = [boot_exit(1.0), boot_exit(2.0), WorkerExit(3.0, ExitCause.ORDERED)]
    assert restart_after(exits) == Restart(0.5)


def test_crashes_between_messages_count_despite_progress() -> None:
    exits = [WorkerExit(float(at), ExitCause.IDLE, lived=0.2, settled=9) for at in range(1, 6)]
    assert restart_after(exits) == GiveUp(65.0)


# --- poison messages ------------------------------------------------------------------------------


@pytest.mark.parametrize("max_crashes", [1, 2, 3, 5, 10, 50])
def test_poison_message_restarts_without_a_wait(max_crashes: int) -> None:
    exits = [handling_exit(float(at)) for at in range(1, max_crashes + 1)]
    for count in range(1, max_crashes + 1):
        assert restart_after(exits[:count], max_crashes=max_crashes) == NOW


def test_poison_message_after_a_boot_crash_opens_no_breaker() -> None:
    exits = [
        boot_exit(1.0),
        boot_exit(2.0),
        boot_exit(3.0),
        boot_exit(4.0),
        *map(handling_exit, (5.0, 6.0, 7.0)),
    ]
    assert isinstance(restart_after(exits), Restart)


def test_poison_messages_among_good_ones_restart_immediately() -> None:
    exits = []
    for number in range(100):
        exits += [handling_exit(10.0 * number, settled=50), handling_exit(10.0 * number + 1)]
        exits += [handling_exit(10.0 * number + 2)]
        assert restart_after(exits) == NOW


def test_handler_that_crashes_on_each_message_opens_the_breaker() -> None:
    exits = [handling_exit(float(at)) for at in range(1, 21)]
    assert restart_after(exits[:4]) == NOW
    assert restart_after(exits[:5]) == Restart(0.5)
    assert restart_after(exits[:12]) == Restart(1.0)
    assert restart_after(exits[:19]) == Restart(4.0)
    assert restart_after(exits) == GiveUp(80.0)


def test_poison_message_without_crash_limit_opens_the_breaker() -> None:
    exits = [handling_exit(float(at)) for at in range(1, 21)]
    assert isinstance(restart_after(exits[:19], max_crashes=0), Restart)
    assert restart_after(exits, max_crashes=0) == GiveUp(80.0)


def test_crash_loop_limit_of_one_opens_at_the_first_crash() -> None:
    assert restart_after([boot_exit(1.0)], crash_loop=1) == GiveUp(61.0)


# --- properties -----------------------------------------------------------------------------------

histories = st.lists(
    st.builds(
        WorkerExit,
        at=st.floats(0, 1e6),
        cause=st.sampled_from(ExitCause),
        lived=st.sampled_from([0.0, 0.1, 29.0, 31.0]),
        settled=st.integers(0, 2),
    ),
    max_size=80,
).map(lambda exits: sorted(exits, key=lambda end: end.at))


@given(histories, st.floats(0, 1e6), st.floats(0, 1), st.integers(1, 10), st.integers(0, 5))
def test_breaker_waits_are_bounded_and_it_closes(
    exits: list[WorkerExit], since: float, jitter: float, crash_loop: int, max_crashes: int
) -> None:
    now = (exits[-1].at if exits else 0.0) + since
    found = restart_after(exits, now, crash_loop=crash_loop, max_crashes=max_crashes, jitter=jitter)
    if isinstance(found, GiveUp):
        assert now < found.until <= now + 60.0
        assert (
            restart_after(exits, found.until, crash_loop=crash_loop, max_crashes=max_crashes) == NOW
        )
    else:
        assert 0 <= found.after <= BACKOFF.max


@pytest.mark.parametrize("max_crashes", [0, 1, 3, 7])
def test_exit_history_is_long_enough_for_the_breaker(max_crashes: int) -> None:
    kept = history_max(crash_loop=5, max_crashes=max_crashes)
    exits = [handling_exit(1.0)] * 1000
    assert isinstance(restart_after(exits[-kept:], max_crashes=max_crashes), GiveUp)


@given(histories, st.integers(1, 6), st.integers(0, 4))
def test_bounded_exit_history_gives_the_same_plan(
    exits: list[WorkerExit], crash_loop: int, max_crashes: int
) -> None:
    # An orderly exit of a worker that was not ready yet takes a place in the history but changes
    # nothing, so it is left out.
    exits = [end for end in exits if end.cause is not ExitCause.ORDERED or end.lived]
    kept = exits[-history_max(crash_loop=crash_loop, max_crashes=max_crashes) :]
    options = {"crash_loop": crash_loop, "max_crashes": max_crashes}
    whole, part = (restart_after(each, **options) for each in (exits, kept))
    assert whole == part
