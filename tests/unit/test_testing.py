"""`streamqd.testing` reports for a run exactly what the daemon would do."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from os import _exit
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamqd import (
    Backoff,
    ConfigError,
    Context,
    Dead,
    Failures,
    Message,
    MessageTooLargeError,
    Outgoing,
    Release,
    Result,
    Retry,
    RetryPolicy,
    SoftTimeout,
    handler,
)
from streamqd.testing import Worker, assert_idempotent, run, run_batch, run_to_end

seen: list[Message] = []


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    seen.clear()
    yield
    seen.clear()


@handler(topic="orders", group="bill", max_attempts=3, backoff=Backoff(base=10, jitter="none"))
def obey(msg: Message) -> object:
    """Do what the payload requests."""
    seen.append(msg)
    word = msg.text()
    if word == "fail":
        raise OSError("the disk is full")
    if word == "retry":
        raise Retry(after=7)
    if word == "dead":
        raise Dead("no such customer")
    if word == "release":
        raise Release
    if word == "wait":
        threading.Event().wait(30)
    if word == "say":
        return Result.DEAD
    return None


async def obey_async(msg: Message) -> object:
    """Do what the payload requests, on an event loop."""
    await asyncio.sleep(30 if msg.payload == b"wait" else 0)
    return None if msg.payload == b"wait" else obey(msg)


# --- one run --------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [obey, obey_async])
@pytest.mark.parametrize(
    ("word", "verdict", "reason", "delay"),
    [
        ("done", "ack", "", None),
        ("fail", "retry", "", (10, 10)),
        ("retry", "retry", "", (7, 7)),
        ("dead", "dead", "dead", None),
        ("say", "dead", "dead", None),
        ("release", "release", "", (1, 1)),
    ],
)
def test_run_returns_the_verdict_of_each_result(
    function: Any, word: str, verdict: str, reason: str, delay: Any
) -> None:
    backoff = {"base": 10, "jitter": "none"}
    found = run(function, word, max_attempts=3, backoff=backoff)

    assert (found.verdict, found.reason, found.delay) == (verdict, reason, delay)
    assert (found.error is None) is (verdict == "ack")
    assert (found.dead_letter is not None) is (verdict == "dead")


def test_test_message_equals_that_of_a_producer() -> None:
    run(obey, {"a": "ü"}, key="k", headers={"x": "1"}, age=60, attempt=2)
    [msg] = seen
    assert (msg.json(), msg.key, msg.headers, msg.attempt) == ({"a": "ü"}, b"k", {"x": "1"}, 2)
    assert (msg.topic, msg.group, msg.partition) == ("orders", "bill", 0)
    assert msg.id != msg.original_id
    run(obey, Outgoing(b"\xff\x00", key=b"k2"), topic="orders")
    assert (seen[1].payload, seen[1].key, seen[1].attempt) == (b"\xff\x00", b"k2", 1)


def test_unsendable_message_cannot_be_tested() -> None:
    with pytest.raises(MessageTooLargeError):
        run(obey, b"x" * (1 << 20 | 1))
    with pytest.raises(TypeError):
        run(obey, object())


def test_last_attempt_returns_the_dead_letter_of_the_daemon() -> None:
    found = run(obey, "fail", attempt=3)
    assert (found.verdict, found.reason, found.attempt) == ("dead", "attempts", 3)
    letter = found.dead_letter
    assert letter is not None
    assert (letter.group, letter.attempts, letter.error_class) == ("bill", 3, "OSError")
    assert letter.handler == f"{__name__}:obey"
    assert letter.traceback.count("File ") == 1, "frames of ours are not the user's"
    assert run(obey, "fail", attempt=3, dlq_error="class").dead_letter.error == ""  # type: ignore[union-attr]


def test_old_message_is_dead_and_expired_one_is_not_run() -> None:
    assert run(obey, "fail", age=3600, retry_max_age="1h").reason == "too-old"
    assert run(obey, "fail", age=3599, retry_max_age="1h").verdict == "retry"
    seen.clear()
    assert run(obey, "fail", expires=30, age=30).verdict == "expired"
    noon = datetime(2020, 1, 1, tzinfo=UTC)
    assert run(obey, "fail", expires=noon).verdict == "expired"
    assert seen == []
    assert run(obey, "done", expires=30, age=29).verdict == "ack"


@pytest.mark.parametrize("function", [obey, obey_async])
def test_soft_timeout_raises_in_the_handler(function: Any) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    found = run(function, "wait", timeout=0.05)
    assert isinstance(found.error, SoftTimeout)
    assert found.verdict == "retry"
    assert signal.getsignal(signal.SIGUSR1) is before
    assert run(function, "done", timeout=30).verdict == "ack"


def test_soft_timeout_requires_the_main_thread() -> None:
    errors: list[BaseException] = []

    def elsewhere() -> None:
        try:
            run(obey, "done", timeout=30)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "only in the main thread" in str(errors)


def test_run_accepts_typed_payloads_and_batches() -> None:
    @dataclass
    class Order:
        number: int

    def typed(order: Order, msg: Message) -> None:
        assert (order.number, msg.json()) == (7, {"number": 7})

    # Annotations are strings in this module and the class is local, so they have to be resolved
    # here.
    typed.__annotations__ |= {"order": Order, "msg": Message}
    assert run(typed, {"number": 7}).verdict == "ack"
    assert run(typed, {"number": "7"}).reason == "undecodable"

    def batch(messages: list[Message]) -> None:
        raise Failures({messages[1]: Dead("no"), messages[2]: OSError()})

    found = run_batch(batch, ["a", Outgoing("b", key="k"), "c"])
    assert [each.verdict for each in found] == ["ack", "dead", "retry"]
    assert found[1].message.key == b"k"
    with pytest.raises(TypeError, match="takes one message"):
        run_batch(obey, ["a"])
    with pytest.raises(ConfigError, match="on_error"):
        run_batch(batch, ["a"], on_error="block")


def test_run_options_override_handler_settings() -> None:
    assert run(obey, "fail", attempt=2).delay == (20, 20)
    policy = RetryPolicy(backoff=Backoff("fixed", 4), dead_on=(OSError,))
    assert run(obey, "fail", retry=policy).reason == "not-retried"
    assert run(obey, "retry", backoff={"base": 1}).delay == (7, 7)
    assert run(obey, "fail", backoff={"base": 6}).delay == (0, 6)
    with pytest.raises(ConfigError, match=r"did you mean .*max_attempts"):
        run(obey, "fail", max_atempts=2)
    with pytest.raises(ConfigError, match="streamqd_daemon"):
        run(obey, "fail", source="dlq")


def test_topic_and_group_select_the_declaration() -> None:
    @handler(topic="a", group="one", max_attempts=1)
    @handler(topic="b", group="two", max_attempts=9)
    def twice(msg: Message) -> None:
        raise OSError(msg.topic)

    assert str(run(twice, "").error) == "a"
    assert run(twice, "", topic="b").verdict == "retry"
    assert run(twice, "", group="one").verdict == "dead"
    assert str(run(twice, "", topic="c", group="two").error) == "c", "it is declared for no c"


# --- to the end -----------------------------------------------------------------------------------


def test_run_to_end_follows_a_message_without_waiting() -> None:
    found = run_to_end(obey, "fail")
    assert [(each.attempt, each.verdict, each.at) for each in found] == [
        (1, "retry", 0),
        (2, "retry", 10),
        (3, "dead", 30),
    ]
    assert len({each.message.id for each in found}) == 3
    assert len({each.message.uid for each in found}) == 1
    full = run_to_end(obey, "fail", backoff={"base": 10}, jitter=0.5)
    assert [each.at for each in full] == [0, 5, 15]
    aged = run_to_end(obey, "fail", max_attempts=0, retry_max_age="100s")
    assert (aged[-1].reason, aged[-1].at) == ("too-old", 150)
    gone = run_to_end(obey, "fail", expires=25)
    assert [each.verdict for each in gone] == ["retry", "retry", "expired"]


@pytest.mark.parametrize("on_error", ["block", "hold-key"])
def test_blocked_message_stays_the_same_entry(on_error: str) -> None:
    found = run_to_end(obey, "fail", on_error=on_error, key="k")
    assert [(each.attempt, each.in_place) for each in found] == [(1, True), (2, True), (3, False)]
    assert len({each.message.id for each in found}) == 1


def test_hold_key_without_a_key_does_not_block() -> None:
    assert not run_to_end(obey, "fail", on_error="hold-key")[0].in_place


def test_run_to_end_reports_endless_retries() -> None:
    with pytest.raises(AssertionError, match="neither acknowledged nor dead-lettered after 5 runs"):
        run_to_end(obey, "release", runs_max=5)


def test_run_twice_delivers_the_same_uid() -> None:
    found = run_to_end(obey, "done", duplicate=True)
    assert [each.verdict for each in found] == ["ack", "ack"]
    assert found[0].message.uid == found[1].message.uid


# --- crashes --------------------------------------------------------------------------------------


def write_twice(path: Path) -> Any:
    def write(msg: Message) -> None:
        try:
            with path.open("a") as file:
                file.write("a")
            with path.open("a") as file:
                file.write("b")
        finally:
            with path.open("a") as file:
                file.write("c")

    return write


def test_crash_at_kills_the_process_of_the_handler(tmp_path: Path) -> None:
    path = tmp_path / "written"
    write = write_twice(path)
    ends = []
    for step in range(40):  # more steps than a run has
        path.write_text("")
        try:
            assert run(write, "", crash_at=step).verdict == "crash"
        except ValueError:
            break
        ends.append(path.read_text())
    assert ends[0] == ""
    assert set(ends) == {"", "a", "ab"}, "no `finally` of a killed process runs"
    with pytest.raises(ValueError, match="returns before it reaches step 40"):
        run(write, "", crash_at=40)
    path.write_text("")
    assert run(write, "", crash_at="end").verdict == "crash"
    assert path.read_text() == "abc"


async def write_async(msg: Message) -> None:
    path = Path(msg.text())
    path.write_text("a")
    await asyncio.sleep(0)
    path.write_text("b")


def test_crash_at_stops_a_coroutine_between_its_steps(tmp_path: Path) -> None:
    path = tmp_path / "written"
    assert run(write_async, str(path), crash_at=3).verdict == "crash"
    assert path.read_text() == "a"


def test_crashes_are_charged_until_the_message_is_dead() -> None:
    found = run(obey, "done", crash_at=0, crashes=2)
    assert (found.verdict, found.reason, found.crashes) == ("dead", "crashes", 3)
    assert found.dead_letter is not None
    assert (found.dead_letter.signal, found.dead_letter.crashes) == ("SIGKILL", 3)
    assert run(obey, "done", crashes=3).reason == "crashes"
    assert seen == [], "a crash happens in another process"
    story = run_to_end(obey, "fail", crash_at=1)
    assert [(each.verdict, each.attempt, each.crashes) for each in story] == [
        ("crash", 1, 1),
        ("retry", 1, 1),
        ("retry", 2, 1),
        ("dead", 3, 1),
    ]
    assert story[2].message.crash_count == 1
    with Worker(obey) as worker:
        assert worker.run(story[2].message, crashes=1).verdict == "retry"
        assert worker.run(story[2].message, crashes=2).reason == "crashes"


def exit_process(msg: Message) -> None:
    """End the process in the way that the payload names."""
    seen.append(msg)
    how, _, number = msg.text().partition(" ")
    own = os.getpid()
    ways: dict[str, Any] = {
        "exit": os._exit,
        "imported": _exit,
        "kill": lambda each: os.kill(own, each),
        "group": lambda each: os.kill(0, each),
        "killpg": lambda each: os.killpg(os.getpgrp(), each),
        "raise": signal.raise_signal,
        "abort": lambda _: os.abort(),
    }
    try:
        ways[how](int(number or 0))
    except Exception:  # noqa: BLE001 - as a handler may
        pytest.fail("nothing was raised that a handler may catch")


@pytest.mark.parametrize(
    ("payload", "what"),
    [
        *(("exit 3", "exit code 3"), ("exit 0", "exit code 0"), ("imported 9", "exit code 9")),
        *(
            ("kill 9", "signal SIGKILL"),
            ("kill 11", "signal SIGSEGV"),
            ("kill 15", "signal SIGTERM"),
        ),
        *(("group 9", "signal SIGKILL"), ("killpg 9", "signal SIGKILL")),
        *(
            ("raise 9", "signal SIGKILL"),
            ("raise 6", "signal SIGABRT"),
            ("abort", "signal SIGABRT"),
        ),
    ],
)
def test_handler_that_exits_its_process_has_crashed(payload: str, what: str) -> None:
    """A handler that exits its process has crashed. Such a handler once terminated pytest."""
    found = run(exit_process, payload)
    assert (found.verdict, found.crashes, found.delay) == ("crash", 1, (0.0, 0.0))
    assert len(seen) == 1
    story = run_to_end(exit_process, payload, max_crashes=2)
    assert [each.verdict for each in story] == ["crash", "dead"]
    assert story[-1].reason == "crashes"
    assert story[-1].dead_letter is not None
    assert what in story[-1].dead_letter.error


async def exit_process_later(msg: Message) -> None:
    await asyncio.sleep(0)
    os._exit(3)


def exit_process_in_batch(batch: list[Message]) -> None:
    os._exit(3)


def test_every_handler_kind_may_exit_its_process() -> None:
    """Coroutines and batch handlers that exit their process have also crashed."""
    assert run(exit_process_later, "").verdict == "crash"
    assert [each.verdict for each in run_batch(exit_process_in_batch, ["a", "b"])] == [
        "crash",
        "crash",
    ]


def test_harmless_signals_and_children_are_not_crashes(tmp_path: Path) -> None:
    """Handled signals and children of the handler are not crashes, and do not affect the test."""

    def forks(msg: Message) -> None:
        os.kill(os.getpid(), 0)
        os.kill(os.getpid(), signal.SIGCONT)
        child = os.fork()
        if child == 0:
            os._exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        other = subprocess.Popen(["sleep", "60"])
        os.kill(other.pid, signal.SIGKILL)
        assert other.wait() == -signal.SIGKILL

    originals = (os._exit, os.kill, os.killpg, os.abort, signal.raise_signal)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        ended = run(forks, "")
    assert (ended.verdict, ended.error) == ("ack", None)
    assert (os._exit, os.kill, os.killpg, os.abort, signal.raise_signal) == originals


def test_handler_that_exits_before_the_crash_step_has_crashed() -> None:
    """A child that exits before it reaches the step of the requested crash has crashed as well."""
    assert run(exit_process, "exit 0", crash_at="end").verdict == "crash"
    assert seen == []


class Interrupted(BaseException):
    """Raised when the waiting process is interrupted."""


def test_abandoned_process_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "pid"

    def interrupt(msg: Message) -> None:
        path.write_text(str(os.getpid()))
        os.kill(os.getppid(), signal.SIGUSR2)
        signal.sigtimedwait([signal.SIGUSR1], 30)

    def stop(_number: int, _frame: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR2, stop)
    try:
        with pytest.raises(Interrupted):
            run(interrupt, "", crash_at="end")
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert not psutil.pid_exists(int(path.read_text()))


def test_keyboard_interrupt_is_raised() -> None:
    def interrupted(msg: Message) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(interrupted, "")


def test_crash_at_requires_a_python_function() -> None:
    with pytest.raises(TypeError, match="has no Python code"):
        run(print, "", crash_at=0)


# --- idempotency ----------------------------------------------------------------------------------


def test_assert_idempotent_finds_a_change_by_a_second_run() -> None:
    total: list[str] = []
    with pytest.raises(
        AssertionError, match=r"the second run changed the result.*\['x'\].*'x', 'x'"
    ):
        assert_idempotent(lambda msg: total.append(msg.text()), "x", observe=lambda: total)
    names: set[str] = set()
    assert_idempotent(lambda msg: names.add(msg.uid), "x", observe=lambda: names)
    with pytest.raises(AssertionError, match="the first run ended with retry"):
        assert_idempotent(obey, "fail", observe=list)


def test_assert_idempotent_finds_a_half_written_state(tmp_path: Path) -> None:
    path = tmp_path / "rows"

    def careless(msg: Message) -> None:
        if path.exists() and path.read_text():  # "it was done before"
            return
        with path.open("a") as file:
            file.write("a")
        with path.open("a") as file:
            file.write("b")

    def reset() -> None:
        path.unlink()

    assert_idempotent(careless, "", observe=path.read_text)
    with pytest.raises(AssertionError, match="the run after a crash at step"):
        assert_idempotent(careless, "", observe=path.read_text, reset=reset)


# --- a worker, with its hooks ---------------------------------------------------------------------

hooks: list[str] = []


def on_start(context: Context) -> None:
    hooks.append(f"start {context.assignment} {context.state_dir.name} {os.getpid()}")


async def on_stop() -> None:
    hooks.append("stop")


def test_hooks_run_only_with_a_state_dir(tmp_path: Path) -> None:
    hooks.clear()
    run(obey, "done")
    assert hooks == []
    with Worker(obey, partition=3, state_dir=tmp_path) as worker:
        first, second = worker.message("done"), worker.message("done")
        assert worker.run(first).verdict == worker.run(second).verdict == "ack"
        assert first.uid != second.uid
    assert hooks == [f"start orders/3/bill {tmp_path.name} {os.getpid()}", "stop"]
    with pytest.raises(RuntimeError, match="`with` block"):
        worker.run(first)
