"""Commands answer an on-call operator's questions.

Each test causes a fault and runs the command for it.

docs/how-to/on-call-runbook.md lists the same commands. test_dead_letters.py covers dead letters and
their replay.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from streamqd.cli import cli
from tests.support.daemon import GROUP, ROOT, TOPIC, Daemon
from tests.support.servers import Server

NewDaemon = Callable[..., Daemon]
PAGE = ROOT / "docs" / "how-to" / "on-call-runbook.md"
PLACE = f"{TOPIC}/0"


def run_command(daemon: Daemon, *words: str) -> tuple[int, str]:
    """Run a command. Return its exit code and output."""
    result = CliRunner().invoke(cli, ["--config", str(daemon.config_path), *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.output


def document(daemon: Daemon, *words: str) -> Any:
    _, output = run_command(daemon, *words, "--json")
    return json.loads(output)


def wait_cause(daemon: Daemon, word: str, place: str = PLACE, *, part: str = "") -> dict[str, Any]:
    """Wait until the first cause of `why` has this word and part of a sentence. Return the answer.

    The test has to wait, because instances publish their state only some time after it changes in
    Redis.
    """

    answer: dict[str, Any] = {}

    def named() -> bool:
        nonlocal answer
        (answer,) = document(daemon, "why", place)["answers"]
        first = answer["causes"][0]
        return first["word"] == word and part in first["sentence"]

    try:
        daemon.wait_for(named, what=f"why says {word}")
    except AssertionError as error:
        raise AssertionError(f"it says {answer}; {error}") from None
    return answer


def published_lag(daemon: Daemon) -> int | None:
    """Return the lag in the owner's last summary, or None if there is none.

    There must be only one partition.
    """
    summary = json.loads(daemon.link.execute("GET", daemon.keys.instance("default", "one")) or "{}")
    lags = [each["lag"] for each in summary.get("assignments", ())]
    return lags[0] if lags else None


# --- who owns partition 3? ------------------------------------------------------------------------


def test_partitions_names_the_owner_of_partition_3(new_daemon: NewDaemon) -> None:
    with new_daemon(partitions=4) as one:
        code, said = run_command(one, "partitions", TOPIC, "--partition", "3")
        assert code == 0
        assert len(said.splitlines()) == 2
        assert re.search(rf"^{TOPIC}/3/{GROUP} +one +{one.epochs()[3]} ", said, re.MULTILINE)

        code, said = run_command(one, "partitions", TOPIC, "--partition", "4")
        assert (code, said) == (
            8,
            f"Error: partition 4 of topic {TOPIC} not found; partitions are numbered 0 to 3\n",
        )
        assert run_command(one, "partitions", "--partition", "1")[0] == 2


# --- why is it not moving? ------------------------------------------------------------------------


def test_why_reports_movement_or_no_waiting_messages(new_daemon: NewDaemon, server: Server) -> None:
    with new_daemon() as one:
        code, said = run_command(one, "why", PLACE)
        assert code == 0
        assert said == f"{PLACE}/{GROUP}: no messages waiting.\n"
        one.wait_for(
            lambda: published_lag(one) == 0, what="the owner has told that there is no lag"
        )
        one.send(["sleep 0.02"] * 1500)
        # A burst made the lag grow once, and it has been shrinking ever since.
        wait_cause(one, "moving")
        if server.version >= (7,):  # older versions report no lag if the group has unread messages
            one.wait_for(
                lambda: (published_lag(one) or 0) > 0, what="the owner has told of the burst"
            )
            wait_cause(one, "moving")
        assert run_command(one, "why", PLACE)[0] == 0


def test_why_names_a_pause_and_its_reason(new_daemon: NewDaemon) -> None:
    with new_daemon() as one:
        run_command(one, "pause", f"{TOPIC}/0/{GROUP}", "--reason", "the disk", "--wait")
        one.send(["ok"])
        code, said = run_command(one, "why", f"{PLACE}/{GROUP}")
        assert code == 1
        assert re.match(rf"{PLACE}/{GROUP} is paused by \S+ \(the disk\)", said)
        assert "streamqd resume" in said


def test_why_names_a_pause_by_a_signal(new_daemon: NewDaemon) -> None:
    with new_daemon() as one:
        one.pause()
        one.send(["ok"])
        wait_cause(one, "paused")


def test_why_names_a_stuck_handler_and_its_message(
    new_daemon: NewDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The default of 10 s would only make the test slower.
    monkeypatch.setattr("streamqd.admin.why.STUCK_SECONDS", 0.5)
    with new_daemon() as one:
        [uid, *_] = one.send(["await gate", "ok", "ok"])
        answer = wait_cause(one, "slow-handler")
        said = f"on one has been working on one message ({uid}) for"
        assert said in answer["causes"][0]["sentence"]
        one.wait_for(
            lambda: re.search(rf"{TOPIC}/{GROUP} .* running [1-9]", run_command(one, "status")[1]),
            what="status reports that it runs, not that it is ready",
        )
        assert run_command(one, "why", TOPIC)[1].startswith(
            f"the handler of {PLACE}/{GROUP} on one has"
        )
        (one.folder / "gate").touch()


TALKING = """
import time
from pathlib import Path

def obey(message):
    if message.text() == "says":
        message.progress()
    while not Path(message.text()).exists():
        time.sleep(0.01)
"""


def test_why_shows_the_progress_of_a_stuck_run(
    new_daemon: NewDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamqd.admin.why.STUCK_SECONDS", 0.2)
    with new_daemon(code=TALKING) as one:
        for text, said in (("says", True), ("silent", False)):
            [uid] = one.send([text])
            answer = wait_cause(one, "slow-handler", part=uid.rpartition("/")[2])
            sentence = answer["causes"][0]["sentence"]
            assert ("(it reported progress " in sentence) is said, "it is that of this run"
            (one.folder / text).touch()


def test_why_names_a_crash_loop(new_daemon: NewDaemon) -> None:
    one = new_daemon(
        partitions=2,
        daemon={"crash_loop": 1, "crash_cooldown": "10m"},
        consumer={"max_crashes": 0},
    )
    with one:
        one.send(["segv"], partition=0)
        wait_cause(one, "crash-loop", part="process terminated with signal SIGSEGV")
        assert run_command(one, "why", PLACE)[0] == 1


def test_why_names_the_error_if_every_message_fails(new_daemon: NewDaemon) -> None:
    backoff = {"kind": "fixed", "base": "50ms", "jitter": "none"}
    with new_daemon(consumer={"max_attempts": 0, "backoff": backoff}) as one:
        one.send(["fail"] * 20)
        wait_cause(one, "failing", part="ValueError")


def test_why_names_a_wait_for_the_next_attempt(new_daemon: NewDaemon) -> None:
    backoff = {"kind": "fixed", "base": "5m", "max": "5m", "jitter": "none"}
    with new_daemon(consumer={"backoff": backoff}) as one:
        one.send(["fail"])
        assert wait_cause(one, "waiting-for-retry", part="ValueError")["waiting_retries"] == 1


def test_why_names_a_group_that_no_instance_offers(new_daemon: NewDaemon) -> None:
    with new_daemon(groups=["bill", "mail"]) as one:
        one.send(["ok"])
        one.wait_settled()
        one.stop()
    two = new_daemon(groups=["mail"], name="two")
    with two:
        answer = wait_cause(two, "no-consumer", f"{PLACE}/bill")
        assert f"a consumer of {TOPIC}/bill" in answer["causes"][0]["sentence"]


def test_why_reports_that_no_instance_is_live(new_daemon: NewDaemon) -> None:
    one = new_daemon()
    with one:
        one.stop()
    assert wait_cause(one, "no-instance")["owner"] == ""


def test_why_names_instances_at_max_partitions(new_daemon: NewDaemon) -> None:
    with new_daemon(partitions=2, daemon={"max_partitions": 1}) as one:
        one.send(["ok"], partition=1)
        answer = wait_cause(one, "max-partitions", f"{TOPIC}/1")
        assert "one 1 of 1" in answer["causes"][0]["sentence"]


def test_why_names_another_client_that_holds_a_message(new_daemon: NewDaemon) -> None:
    one = new_daemon(consumer={"reclaim_idle": "10m"})
    with one:
        one.pause()
        one.send(["ok"])
        stream = one.keys.stream(TOPIC, 0)
        one.link.execute("XREADGROUP", "GROUP", GROUP, "bob", "STREAMS", stream, ">")
        one.signal(signal.SIGCONT)
        answer = wait_cause(one, "other-client")
        assert "'bob' holds 1 message" in answer["causes"][0]["sentence"]


def test_why_names_a_silent_owner(new_daemon: NewDaemon) -> None:
    one = new_daemon(daemon={"lease_ttl": "1s"})
    with one:
        one.send(["await gate"])
        one.signal(signal.SIGSTOP)
        try:
            assert "one" in wait_cause(one, "owner-silent")["causes"][0]["sentence"]
        finally:
            one.signal(signal.SIGCONT)


@pytest.mark.parametrize("place", ["/", "orders/", "orders/x", "/1", "orders/0/", "o/0/g/h"])
def test_why_refuses_a_malformed_place(new_daemon: NewDaemon, place: str) -> None:
    code, said = run_command(new_daemon(), "why", place)
    assert code == 2
    assert "is not TOPIC, TOPIC/PARTITION or" in said


def test_why_refuses_an_unknown_topic_partition_or_group(new_daemon: NewDaemon) -> None:
    with new_daemon() as one:
        assert run_command(one, "why", "nothing/0")[0] == 8
        assert run_command(one, "why", f"{TOPIC}/7")[0] == 8
        assert run_command(one, "why", f"{PLACE}/nobody")[0] == 8


# --- how large is the lag, and since when? --------------------------------------------------------


def test_status_shows_the_lag_and_its_start(new_daemon: NewDaemon, server: Server) -> None:
    # Redis 6.2 reports no lag if the group has unread messages, so there is no trend.
    trend = "trend unknown" if server.version < (7,) else "(steady|growing|shrinking)"
    with new_daemon(partitions=2) as one:
        one.send(["await gate"], partition=0)
        [first, *_] = one.send(["sleep 0.01"] * 300, partition=0)
        since = int(first.rpartition("/")[2].partition("-")[0])

        def behind() -> dict[str, Any]:
            found = document(one, "status")["lagging"]
            known = found and (server.version < (7,) or found[0]["lag_per_second"] is not None)
            return found[0] if known else {}

        told = one.wait_for(behind, what="status tells how far behind the group is")
        assert (told["topic"], told["group"], told["partitions"]) == (TOPIC, GROUP, [0])
        # The worker has fetched some of the messages, and the rest is unread.
        assert 0 < told["lag"] <= 300
        assert told["since_unix_ms"] >= since
        said = run_command(one, "status")[1]
        assert re.search(
            rf"{TOPIC}/{GROUP} lags by [\d,]+ messages? in partition 0, since 20\d\d-\d\d-\d\d"
            rf" \d\d:\d\d:\d\dZ \(.+\), {trend}",
            said,
        )
        (one.folder / "gate").touch()
        one.wait_settled()
        assert document(one, "status")["lagging"] == []


# --- what happens if I stop this host? ------------------------------------------------------------


def test_drain_dry_run_names_takers_and_stranded_groups(new_daemon: NewDaemon) -> None:
    one = new_daemon(partitions=2, groups=["bill", "mail"], name="a")
    with one:
        assert "the last instance" in run_command(one, "drain", "a", "--dry-run")[1]
        one.send(["await gate"], partition=0)
        two = new_daemon(partitions=2, groups=["bill"], name="b")
        two.start()
        two.wait_for(lambda: len(document(one, "status")["instances"]) == 2, what="both live")

        def planned() -> dict[str, Any]:
            found: dict[str, Any] = document(one, "drain", "a", "--dry-run")["departure"]
            return found if found["longest_run_seconds"] else {}

        plan = one.wait_for(planned, what="the plan knows of the running message")
        takers = {
            (u["group"], u["partition"]): (u["to"], u["stranded"]) for u in plan["assignments"]
        }
        mail = {("mail", n): ("", "no-consumer") for n in range(2)}
        assert mail.items() <= takers.items()
        assert {to for (group, _), (to, _) in takers.items() if group == "bill"} <= {"b"}

        code, said = run_command(one, "drain", "a", "--dry-run")
        assert code == 0
        assert "! 2 partitions without a new owner, because no other instance" in said
        assert f"{TOPIC}/0/mail, {TOPIC}/1/mail" in said
        assert "the longest running message has been running for" in said
        assert document(one, "status")["directives"] == []  # the dry run wrote no directive
        (one.folder / "gate").touch()


# --- the runbook ------------------------------------------------------------------------------


def test_runbook_names_existing_commands() -> None:
    commands = re.findall(r"^streamqd (.+?)(?: *#.*)?$", PAGE.read_text(), re.MULTILINE)
    assert len(commands) >= 6
    for line in commands:
        verbs = [word for word in line.split() if re.fullmatch("[a-z]+", word)]
        at: Any = cli
        for verb in verbs:
            if not hasattr(at, "get_command"):
                break
            at = at.get_command(None, verb)
            assert at is not None, f"streamqd {line}"
        options = {name for each in at.params for name in each.opts}
        assert {word for word in line.split() if word.startswith("--")} <= options, line


def test_runbook_is_linked() -> None:
    assert "on-call-runbook.md" in Path(ROOT / "docs" / "index.md").read_text()
