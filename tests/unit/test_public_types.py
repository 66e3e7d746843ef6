"""The types of every public name satisfy a user's type checker in its strict mode."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import streamqd
from streamqd import testing
from tests.support.type_checker import lines_with_errors
from tests.unit import test_producer_types

GOOD = """
from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from streamqd import (
    Backoff, BatchRejectedError, BufferedProducer, ConfigError, Context, Dead, DeadLetter, Failures,
    Message, MessageTooLargeError, Producer, Receipt, RedisResponseError, RedisUnavailableError,
    Release, Result, Retry, RetryPolicy, SoftTimeout, StreamqdError, TopicNotFoundError,
    __version__, handler, schedule,
)
from streamqd.pytest_plugin import RunDaemon
from streamqd.testing import (
    Run, Settled, Verdict, Worker, assert_idempotent, next_ticks, run, run_batch, run_to_end,
)

policy = RetryPolicy(
    max_attempts=3, backoff=Backoff(kind="fixed", base=2.0), dead_on=(KeyError, "OSError")
)
version: str = __version__
folder = Path()


def on_start(context: Context) -> None:
    global folder
    folder = context.state_dir / context.instance / str(context.assignment.partition)


@schedule(cron="0 3 * * *", timezone="Europe/Berlin", payload={"kind": "full"})
@handler(topic="orders", group="bill", retry=policy, timeout="5s", max_messages=1000)
def bill(msg: Message) -> Result:
    key: bytes | None = msg.key
    who: str = msg.headers.get("who", msg.uid)
    if msg.attempt > 2 or msg.expires_at is not None:
        raise Dead(f"{who} {key!r}")
    if msg.crash_count:
        raise Retry(after=1.5)
    letter: DeadLetter | None = msg.dead_letter
    if letter is not None and letter.exit_code is None:
        raise Release
    try:
        number: int = msg.json()["number"] + len(msg.payload) + msg.partition + msg.epoch
        msg.progress()
    except SoftTimeout:
        return Result.RETRY
    return Result.ACK if number else Result.DEAD


@handler(topic="orders", group="count")
async def count(messages: list[Message]) -> Failures:
    return Failures({each: ValueError(each.text()) for each in messages})


def sent(producer: BufferedProducer) -> Receipt:
    return producer.send("orders", b"x")


def send() -> str:
    try:
        with Producer() as producer:
            return producer.send("orders", {"number": 1})
    except BatchRejectedError as error:
        return ", ".join(each for each in error.ids if each is not None)
    except (
        TopicNotFoundError, RedisResponseError, RedisUnavailableError, MessageTooLargeError
    ) as error:
        return str(error)
    except ConfigError as error:
        problems: list[str] = error.problems
        return problems[0]
    except StreamqdError as error:
        return str(error)


def test_bill(tmp_path: Path) -> None:
    ended: Run = run(bill, {"number": 1}, key="k", headers={"a": "b"}, attempt=2, timeout="1s")
    verdict: Verdict = ended.verdict
    delay: tuple[float, float] | None = ended.delay
    text: str = ended.dead_letter.error if ended.dead_letter is not None else f"{verdict} {delay}"
    story: list[Run] = run_to_end(bill, b"x", crash_at="end", duplicate=True, jitter=0.5)
    several: list[Run] = run_batch(count, ["a", "b"], batch=2, retry=policy)
    with Worker(bill, topic="orders", state_dir=tmp_path, on_error="block") as worker:
        message: Message = worker.message(text)
        assert worker.run(message, crash_at=0) not in [*story, *several]
    assert_idempotent(bill, "x", observe=lambda: 1, reset=lambda: None)
    first: datetime = next_ticks(bill, start=datetime.now(UTC), count=2, cron="0 3 * * *")[0]
    assert first


@pytest.mark.usefixtures("streamqd_redis_url")
def test_daemon(streamqd_daemon: RunDaemon, streamqd_server: str) -> None:
    settled: Settled = streamqd_daemon("bills", timeout=30)
    assert settled.events[0]["event"] and settled.state_dir / streamqd_server
"""

WRONG = """
from streamqd import Backoff, Context, Dead, Failures, Message, Result, Retry, RetryPolicy, handler
from streamqd.testing import Worker, assert_idempotent, run, run_batch, run_to_end

handler(topic="orders")
handler(topic="orders", group="g", retry=5)
Retry(after="5s")
Failures([])
RetryPolicy(max_attempts="many")
RetryPolicy(max_tries=5)
Backoff(base="1s")
Result.DONE
def wrong(msg: Message, context: Context) -> None:
    msg.key = b"x"
    text: str = msg.payload
    context.assignment = msg.topics
run("module:function", b"x")
run(wrong, b"x", key=5)
run(wrong, b"x").verdict == "acknowledged"
run_batch(wrong, 5)
run_to_end(wrong, b"x", jitter="half")
run(wrong, b"x", crash_at="middle")
assert_idempotent(wrong, b"x")
Worker(wrong, state_dir="state")
run(wrong, b"x", max_atempts=3)
run_to_end(wrong, b"x", max_attempts="three")
run_batch(wrong, [b"x"], on_error="wait")
assert_idempotent(wrong, b"x", observe=lambda: 1, retry=3)
Worker(wrong, timeout=object())
"""
WRONG_LINES = {*range(5, 13), *range(14, 30)}


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[int]]:
    """Return the lines that have errors in the two modules, from a single run of the checker."""
    folder = tmp_path_factory.mktemp("users")
    return lines_with_errors(folder, {"good.py": GOOD, "wrong.py": WRONG})


@pytest.mark.slow
def test_public_types_pass_pyright(tmp_path: Path) -> None:
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "producers.py").write_text(test_producer_types.GOOD)
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable]
    ended = subprocess.run(
        [*command, "--project", tmp_path],
        cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert "0 errors, " in ended.stdout, ended.stdout + ended.stderr
    assert ended.returncode == 0


@pytest.mark.slow
def test_type_checker_accepts_correct_use_of_the_api(errors: dict[str, set[int]]) -> None:
    assert errors.keys() <= {"wrong.py"}


def test_type_checker_finds_wrong_use_of_the_api(errors: dict[str, set[int]]) -> None:
    assert errors["wrong.py"] == WRONG_LINES


def imported_names(code: str, module: str) -> set[str]:
    """Return the names that a module imports from another one."""
    nodes = [each for each in ast.walk(ast.parse(code)) if isinstance(each, ast.ImportFrom)]
    return {alias.name for node in nodes if node.module == module for alias in node.names}


def test_type_test_uses_every_public_name() -> None:
    both = imported_names(GOOD, "streamqd") | imported_names(test_producer_types.GOOD, "streamqd")
    assert set(streamqd.__all__) - both == set(), "use the new name in GOOD"
    assert set(testing.__all__) - imported_names(GOOD, "streamqd.testing") == set()
