"""The verdict on a soak test finds every planted violation and accepts every true cause."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from tests.support.causes import ACK_DELAY, SLACK, Strike
from tests.support.ledger import Record
from tests.support.verdict import ATTEMPTS_MAX, ChargeReport, Report, judge

G = "g"
NO_LETTERS: dict[str, set[str]] = {G: set()}


class Story:
    """Writes a ledger. Message n goes to partition 0 and has the ID `n-0`. Its epoch is the pid."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.strikes: list[Strike] = []

    def send(self, number: int, work: str = "sleep 0", kind: str = "sent", at: float = 0.0) -> None:
        self._tell("planned", number, work, at)
        if kind:
            self._tell(kind, number, work, at)

    def _tell(self, kind: str, number: int, work: str, at: float) -> None:
        uid = f"t/0/{number}-0" if kind == "sent" else ""
        self.records.append(Record(kind, uid, "", 0, 1, at, f"{number} {work}"))

    def run(
        self,
        number: int,
        pid: int = 100,
        at: float = 1.0,
        *,
        end: str = "end",
        took: float = 0.01,
        attempt: int = 1,
        uid: str = "",
        epoch: int = 0,
    ) -> None:
        uid = uid or f"t/0/{number}-0"
        text = f"{number} {epoch or pid}"
        self.records.append(Record("start", uid, G, attempt, pid, at, text))
        if end:
            self.records.append(Record(end, uid, G, attempt, pid, at + took, text))

    def strike(self, kind: str, *pids: int, at: float, lasting: float = 0.0) -> None:
        self.strikes.append(Strike(len(self.strikes), kind, "a", pids, at, at + lasting))

    def judged(self, letters: dict[str, set[str]] = NO_LETTERS, **more: Any) -> Report:
        return judge(self.records, self.strikes, letters, **more)


@pytest.fixture
def story() -> Story:
    return Story()


def test_clean_soak_has_no_faults(story: Story):
    for number in (1, 2, 3):
        story.send(number)
        story.run(number, at=float(number))
    report = story.judged()
    assert report.faults_of_ours() == {}
    assert (report.sent, report.handled, report.duplicated) == (3, 3, [])


# --- lost, recovered, unexpected ------------------------------------------------------------------


@pytest.mark.parametrize("end", ["", "raise"])
def test_confirmed_message_without_success_is_lost(story: Story, end: str):
    story.send(1)
    story.run(1, end=end)
    assert story.judged().lost == ["1 of g"]


def test_unstarted_message_is_lost_but_a_dead_one_is_not(story: Story):
    story.send(1)
    story.send(2, "dead")
    story.run(2, end="raise")
    assert story.judged({G: {"2"}}).lost == ["1 of g"]


def test_message_must_be_handled_by_every_group(story: Story):
    story.send(1, kind="unknown")
    story.run(1)
    report = story.judged({G: set(), "other": set()})
    assert report.lost == ["1 of other"]


@pytest.mark.parametrize("kind", ["unknown", ""])
def test_handled_message_of_unknown_outcome_is_recovered(story: Story, kind: str):
    story.send(1, kind=kind)
    story.send(2, kind=kind)
    story.run(2)
    report = story.judged()
    assert (report.unknown, report.recovered, report.lost) == (2, ["2"], [])


def test_run_of_an_unsent_message_is_unexpected(story: Story):
    story.send(1, kind="refused")
    for number in (1, 2):
        story.run(number, at=float(number))
    assert story.judged().unexpected == ["1", "2"]


def test_second_entry_of_a_message_is_unexpected(story: Story):
    story.send(1)
    story.run(1)
    story.run(1, at=2.0, uid="t/0/7-0", pid=101)
    assert story.judged().unexpected == ["1"]


# --- duplicates -----------------------------------------------------------------------------------


def repeat_run(story: Story, number: int = 1, *, end: str = "", took: float = 0.01) -> None:
    """Record a run in process 100 at 1.0 s, and its repetition in process 101 at 2.0 s."""
    story.send(number)
    story.run(number, at=1.0, end=end, took=took)
    story.run(number, pid=101, at=2.0)


def test_duplicate_without_a_cause_is_unexplained(story: Story):
    repeat_run(story)
    [found] = story.judged().unexplained
    assert (found.number, found.pids) == ("1", (100, 101))


def test_running_message_of_a_killed_worker_is_explained(story: Story):
    repeat_run(story)
    story.strike("kill worker", 100, at=1.5)
    report = story.judged()
    assert report.faults_of_ours() == {}
    assert report.causes() == {"kill worker: running": 1}


@pytest.mark.parametrize(
    "strike",
    [
        ("kill worker", 102, 1.5),  # another process
        ("kill worker", 101, 1.5),  # the process that repeated the run
        ("kill worker", 100, 2.5),  # after the repetition
        ("kill housekeeper", 100, 1.5),  # a strike after which no run repeats
        ("drop reply", 100, 1.5),
        ("restart", 100, 1.5),
    ],
)
def test_unrelated_strike_explains_nothing(story: Story, strike: tuple[str, int, float]):
    repeat_run(story)
    kind, pid, at = strike
    story.strike(kind, pid, at=at)
    assert len(story.judged().unexplained) == 1


@pytest.mark.parametrize(
    ("deaf_at", "deaf_pid", "explained"), [(3.5, 100, True), (9.0, 100, False), (3.5, 200, False)]
)
def test_half_open_connection_after_an_outage_costs_the_lease(
    story: Story, deaf_at: float, deaf_pid: int, *, explained: bool
):
    story.send(1)
    story.run(1, at=1.0, end="")
    story.run(1, pid=101, at=4.5)
    story.strike("kill redis", at=1.005, lasting=2.5)
    story.strike("half open", deaf_pid, at=deaf_at)
    assert len(story.judged().unexplained) == (0 if explained else 1)


def test_cause_explains_one_duplicate_per_process(story: Story):
    """A cause explains one duplicate per process.

    The scoreboard shows which runs of a dead process had finished, so only a running message
    repeats.
    """
    for number, at in ((1, 1.0), (2, 1.2)):
        story.send(number)
        story.run(number, at=at, end="end" if number == 1 else "")
    story.strike("kill worker", 100, at=1.25)
    for number in (1, 2):
        story.run(number, pid=101, at=2.0 + number)
    report = story.judged()
    assert [each.number for each in report.unexplained] == ["1"]
    assert report.causes() == {"kill worker: running": 1}


def test_message_finished_long_before_a_kill_is_unexplained(story: Story):
    repeat_run(story, end="end")
    story.strike("kill worker", 100, at=1.9)
    assert len(story.judged().unexplained) == 1


def test_process_repeating_its_own_run_is_unexplained(story: Story):
    story.send(1)
    for at in (1.0, 2.0):
        story.run(1, at=at)
    story.strike("cut off", 100, at=1.5, lasting=1.0)
    assert len(story.judged().unexplained) == 1


INSTANCES = ["kill supervisor", "stop supervisor", "stop host", "cut off"]
of_instances = pytest.mark.parametrize("kind", INSTANCES)


@of_instances
@pytest.mark.parametrize(
    ("ended_at", "explained"),
    [(2.99, True), (3.0 - ACK_DELAY - SLACK + 0.01, True), (3.0 - ACK_DELAY - SLACK - 0.01, False)],
)
def test_instance_repeats_its_unacknowledged_messages(
    story: Story, kind: str, ended_at: float, *, explained: bool
):
    """An instance repeats only unacknowledged messages.

    An acknowledgment that is older than 20 ms is written before the next run starts.
    """
    story.send(1)
    story.send(2)
    story.run(1, at=ended_at - 0.01)
    story.run(2, at=3.0, end="")
    story.strike(kind, 100, 200, at=3.1, lasting=2.0)
    for number in (1, 2):
        story.run(number, pid=101, at=4.0 + number)
    report = story.judged()
    assert [each.number for each in report.unexplained] == ([] if explained else ["1"])
    assert report.causes()[f"{kind}: running"] == 1


@of_instances
@pytest.mark.parametrize(("took", "explained"), [(0.019, True), (0.021, False)])
def test_long_run_is_acknowledged_before_the_next_start(
    story: Story, kind: str, took: float, *, explained: bool
):
    story.send(1)
    story.send(2)
    story.run(1, at=1.0, took=took)
    story.run(2, at=1.0 + took, end="")
    story.strike(kind, 100, at=1.1, lasting=2.0)
    for number in (1, 2):
        story.run(number, pid=101, at=4.0 + number)
    report = story.judged()
    assert [each.number for each in report.unexplained] == ([] if explained else ["1"])


def test_largest_repetition_of_a_strike_is_reported(story: Story):
    for number in range(1, 7):
        story.send(number)
    for first, pid in ((1, 100), (4, 200)):
        for number in range(first, first + 3):
            last = number == first + 2 and pid == 100
            story.run(number, pid, at=1.0 + number / 1000, took=0.001, end="" if last else "end")
    story.strike("kill supervisor", 100, 200, at=1.01)
    for number in (1, 2, 3, 5, 6):
        story.run(number, pid=101 if number < 4 else 201, at=2.0 + number)
    report = story.judged()
    assert report.unexplained == []
    assert report.max_repeats() == {"not acknowledged": 2, "running": 1}
    assert [each.seconds for each in report.duplicated] == [0.001, 0.001, None, 0.001, 0.001]
    assert report.repeated_blows() == []
    assert story.judged(each={G}).repeated_blows() == [("0", 100, G), ("0", 200, G)]


@of_instances
@pytest.mark.parametrize("end", ["end", "raise"])
def test_idle_process_had_no_unacknowledged_messages(story: Story, kind: str, end: str):
    """An idle process has settled all, so neither this run nor an earlier one is explained."""
    for number, at in ((1, 1.0), (2, 1.015)):
        story.send(number)
        story.run(number, at=at, end=end, took=0.001)
    story.strike(kind, 100, at=1.016 + 2 * SLACK, lasting=2.0)
    for number in (1, 2):
        story.run(number, pid=101, at=4.0 + number)
    assert [each.number for each in story.judged().unexplained] == ["1", "2"]


@of_instances
@pytest.mark.parametrize(
    ("whom", "at", "lasting", "explained"),
    [
        ("redis", 1.005, 1.5, True),
        ("a", 1.0, 1.5, True),
        ("b", 1.0, 1.5, False),  # another instance
        ("redis", 2.0, 0.5, False),  # the run had finished long before the outage
        ("redis", 0.1, 0.2, True),  # the next try comes late
        ("redis", -9.0, 0.5, False),  # but not that late
    ],
)
def test_no_process_settles_while_redis_is_unavailable(
    story: Story, kind: str, whom: str, at: float, lasting: float, *, explained: bool
):
    repeat_run(story, end="end")
    story.records = [each._replace(at=3.5) if each.pid == 101 else each for each in story.records]
    story.strike("stop redis" if whom == "redis" else "cut off", at=at, lasting=lasting)
    story.strikes[-1] = story.strikes[-1]._replace(whom=whom)
    story.strike(kind, 100, at=3.0, lasting=2.0)
    assert len(story.judged().unexplained) == (not explained)


@pytest.mark.parametrize("kind", ["kill worker", *INSTANCES])
def test_strike_explains_nothing_for_a_continued_process(story: Story, kind: str):
    story.send(1)
    story.send(2)
    story.run(1, at=1.0, end="")
    story.strike(kind, 100, at=1.005)
    story.run(2, at=1.5)
    story.run(1, pid=101, at=3.0)
    assert len(story.judged().unexplained) == 1


@pytest.mark.parametrize("kind", ["kill worker", "stop worker", *INSTANCES])
def test_run_started_long_after_a_strike_is_unrelated(story: Story, kind: str):
    story.send(1)
    story.strike(kind, 100, at=1.0, lasting=1.0)
    story.run(1, at=2.0 + 2 * SLACK, end="")
    story.run(1, pid=101, at=3.0)
    assert len(story.judged().unexplained) == 1


@pytest.mark.parametrize("kind", ["kill worker", "stop worker"])
def test_finished_runs_of_a_killed_worker_are_not_repeated(story: Story, kind: str):
    for number, end in ((1, "end"), (2, "")):
        story.send(number)
        story.run(number, at=1.0 + number / 100, end=end, took=0.001)
    story.strike(kind, 100, at=1.03, lasting=2.0)
    for number in (1, 2):
        story.run(number, pid=101, at=4.0 + number)
    assert [each.number for each in story.judged().unexplained] == ["1"]


def test_only_a_former_owner_may_start_a_run_late(story: Story):
    story.send(1)
    story.run(1, pid=99, at=1.1)
    story.run(1, pid=100, at=2.01)
    story.strike("stop host", 100, at=0.5, lasting=1.5)
    assert len(story.judged().unexplained) == 1


@pytest.mark.parametrize("kind", ["kill worker", *INSTANCES])
def test_only_a_later_owner_repeats_pending_messages(story: Story, kind: str):
    story.send(1)
    story.run(1, at=1.0, end="")
    story.strike(kind, 100, at=1.005)
    story.run(1, pid=99, at=3.0)
    assert len(story.judged().unexplained) == 1


@pytest.mark.parametrize("kind", ["kill worker", "stop worker", *INSTANCES])
@pytest.mark.parametrize(("took", "explained"), [(0.001, True), (0.003, False)])
def test_failure_waits_only_for_a_quick_run(
    story: Story, kind: str, took: float, *, explained: bool
):
    """A failure waits only for a quick run.

    It may be set aside together with the next one, unless its own run was slow.
    """
    for number, end in ((1, "raise"), (2, "")):
        story.send(number, "fail 1")
        story.run(number, at=1.0 + number / 100, end=end, took=took)
    story.strike(kind, 100, at=1.03, lasting=2.0)
    for number in (1, 2):
        story.run(number, pid=101, at=4.0 + number, end="raise")
    assert [each.number for each in story.judged().unexplained] == ([] if explained else ["1"])


def test_standstill_time_does_not_count(story: Story):
    """The time of a standstill does not count.

    The process was stopped between two runs, and its successor took over the second one.
    """
    for number in (1, 2):
        story.send(number)
    story.run(1, at=1.0)
    for number in (1, 2):
        story.run(number, pid=101, at=2.0 + number)
    story.run(2, at=5.01)
    story.strike("stop host", 100, at=1.011, lasting=4.0)
    assert story.judged().causes() == {
        "stop host: about to begin": 1,
        "stop host: not acknowledged": 1,
    }


def test_process_stopped_within_a_run_starts_no_late_run(story: Story):
    for number in (1, 2):
        story.send(number)
    story.run(1, at=1.0, took=4.0)
    for number in (1, 2):
        story.run(number, pid=101, at=2.0 + number)
    story.run(2, at=5.01)
    story.strike("stop host", 100, at=1.5, lasting=3.5)
    assert [each.number for each in story.judged().unexplained] == ["1", "2"]


@pytest.mark.parametrize(
    ("kind", "began_at", "explained"),
    [
        ("stop host", 2.01, True),
        ("stop worker", 2.01, True),
        ("stop host", 2.2, False),  # long after it could resume
        ("cut off", 2.01, False),  # not stopped, so it sees that its lease has expired
    ],
)
def test_run_started_late_by_a_stopped_process_is_explained(
    story: Story, kind: str, began_at: float, *, explained: bool
):
    for number in (1, 2):
        story.send(number)
        story.run(number, pid=101, at=1.0 + number / 10)  # its successor
    story.run(1, pid=100, at=began_at)
    story.run(2, pid=100, at=began_at + 0.02)
    story.strike(kind, 100, at=0.5, lasting=1.5)
    report = story.judged()
    assert [each.number for each in report.unexplained] == (["2"] if explained else ["1", "2"])


def test_every_repeated_run_needs_its_own_cause(story: Story):
    repeat_run(story)
    story.run(1, pid=102, at=3.0)
    story.strike("kill worker", 100, at=1.5)
    [found] = story.judged().unexplained
    assert found.pids == (101, 102)


# --- charges --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "at", "crashes", "over"),
    [
        ("kill worker", 1.5, 1, False),
        ("kill worker", 1.5, 2, True),  # one run, charged twice
        ("kill worker", 0.5, 1, True),  # the run had not started
        ("drop reply", 1.5, 1, True),  # kills no process
        ("stop host", 1.5, 1, False),  # exceeds its time limit when it resumes
        ("kill supervisor", 1.5, 1, True),  # no record remains
    ],
)
def test_message_is_charged_for_strikes_on_its_runs(
    story: Story, kind: str, at: float, crashes: int, *, over: bool
):
    story.send(1)
    story.run(1, at=1.0, end="")
    story.run(1, pid=101, at=3.0)
    story.strike(kind, 100, at=at)
    report = story.judged(charges={(G, "1"): crashes})
    assert len(report.overcharged) == over
    assert (report.charged, report.charged_most) == (1, crashes)


def test_two_interrupted_runs_may_be_charged_twice(story: Story):
    story.send(1)
    for pid in (100, 101):
        story.run(1, pid, at=float(pid), end="")
        story.strike("kill worker", pid, at=pid + 0.5)
    story.run(1, pid=102, at=200.0)
    assert story.judged(charges={(G, "1"): 2}).overcharged == []
    assert len(story.judged(charges={(G, "1"): 3}).overcharged) == 1


@pytest.mark.parametrize(
    ("group", "partition", "place", "fine"),
    [
        (G, 0, "m:2-0", True),
        (G, 0, "r:7-0", True),  # it may be a retry of the message
        (G, 0, "m:1-0", False),
        (G, 1, "m:2-0", False),
        ("other", 0, "m:2-0", False),
    ],
)
def test_mark_left_by_a_lost_owner_is_charged_once(
    story: Story, group: str, partition: int, place: str, *, fine: bool
):
    """The mark that a lost owner left is charged once.

    That owner was about to run the message, so the ledger has no record of it.
    """
    for number in (1, 2):
        story.send(number)
        story.run(number, at=float(number))
    told = {"blames": [ChargeReport(0, partition, group, place)]}
    assert (story.judged(charges={(G, "2"): 1}, **told).overcharged == []) is fine
    assert len(story.judged(charges={(G, "2"): 2}, **told).overcharged) == 1


@pytest.mark.parametrize(
    ("place", "end", "wrong"),
    [
        ("m:2-0", "", False),
        ("m:1-0", "", True),  # another message
        ("r:2-0", "", True),  # before its own retry
        ("m:3-0", "end", False),  # the run had finished, and the next one was about to start
    ],
)
def test_charged_message_must_be_the_running_one(
    story: Story, place: str, end: str, *, wrong: bool
):
    for number in (1, 2):
        story.send(number)
    story.run(1, at=1.0)
    story.run(2, at=1.1, end=end)
    story.strike("kill worker", 100, at=1.105)
    if not end:
        story.run(2, pid=101, at=2.0)
    report = story.judged(blames=[ChargeReport(100, 0, G, place)])
    assert (report.blamed, len(report.overcharged)) == (1, wrong)


# --- attempts, epochs, order ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("work", "attempts", "dead"),
    [
        ("sleep 0", (1,), False),
        ("fail 1", (1, 2), False),
        (f"fail {ATTEMPTS_MAX}", range(1, ATTEMPTS_MAX + 1), True),
        ("dead", (1,), True),
    ],
)
def test_attempts_must_match_the_failures(
    story: Story, work: str, attempts: tuple[int, ...], *, dead: bool
):
    def told(attempts: list[int], *, dead: bool) -> list[str]:
        story = Story()
        story.send(1, work)
        for attempt, at in zip(attempts, count(1), strict=False):
            last = attempt == attempts[-1] and not dead
            story.run(1, at=float(at), attempt=attempt, end="end" if last else "raise")
        return story.judged({G: {"1"} if dead else set()}).misattributed

    assert told([*attempts], dead=dead) == []
    assert told([*attempts, len(attempts) + 1], dead=dead) != [], "one more"
    assert told([*attempts][1:] or [2], dead=dead) != [], "one was skipped"
    assert told([*attempts], dead=not dead) != [], "buried or not"


Break = Callable[[Story], None]


def share_epoch(story: Story) -> None:
    story.run(2, pid=101, at=2.0, epoch=100)


def run_late(story: Story) -> None:
    story.run(2, pid=101, at=2.0)
    story.run(3, pid=100, at=3.0)


def run_out_of_order(story: Story) -> None:
    story.run(3, at=2.0)
    story.run(2, at=3.0)


@pytest.mark.parametrize(
    ("breaking", "word"),
    [
        (share_epoch, "two processes"),
        (run_late, "after a later one"),
        (run_out_of_order, "after a later one"),
    ],
)
def test_epochs_and_key_order_are_checked(story: Story, breaking: Break, word: str):
    for number in (1, 2, 3):
        story.send(number)
    story.run(1)
    breaking(story)
    [sentence] = story.judged().disorderly
    assert word in sentence


@pytest.mark.parametrize("how", ["raise", None])
def test_repeated_failure_may_follow_a_suspect(story: Story, how: str | None):
    """A repeated failure may come after a suspect.

    The process dies in message 2, before the failure of message 1 is written. Then message 2 runs
    first.
    """
    story.send(1, "fail 1")
    story.send(2)
    story.run(1, at=1.0, end=how)
    story.run(2, at=2.0, end=None)
    story.run(2, pid=101, at=3.0, epoch=101)
    story.run(1, pid=101, at=4.0, epoch=101, end="raise")
    assert bool(story.judged().disorderly) is (how is None)


def test_stalled_process_may_repeat_one_run(story: Story):
    for number in (1, 2, 3):
        story.send(number)
    story.run(1)
    run_late(story)
    story.strike("stop host", 100, at=1.5, lasting=1.45)
    assert story.judged().disorderly == []


@pytest.mark.parametrize(
    ("kind", "at", "lasting"),
    [
        ("cut off", 1.5, 1.45),  # the process was not stopped
        ("stop host", 1.5, 1.0),  # the process resumed long before
        ("stop host", 3.5, 1.0),  # the process was stopped later
        ("kill worker", 2.9, 0.0),
    ],
)
def test_unrelated_strike_excuses_no_late_run(story: Story, kind: str, at: float, lasting: float):
    for number in (1, 2, 3):
        story.send(number)
    story.run(1)
    run_late(story)
    story.strike(kind, 100, at=at, lasting=lasting)
    assert len(story.judged().disorderly) == 1


def test_stall_is_the_longest_wait_for_a_first_run(story: Story):
    story.send(1, at=1.0)
    story.send(2, at=2.0)
    story.run(1, at=1.5)
    story.run(2, at=4.0)
    report = story.judged()
    assert report.stall_seconds == pytest.approx(2.0)
    assert report.stalled.startswith("2 of g")
