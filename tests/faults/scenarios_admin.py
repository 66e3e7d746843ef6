"""Scenarios of an operator: every command that changes data is repeated until it succeeds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from click.testing import CliRunner

from streamqd import config
from streamqd.admin import schedules
from streamqd.cli import cli
from streamqd.model import Assignment
from streamqd.store import directives, members, topics
from streamqd.store.store import Store
from tests.contract.harness import Harness
from tests.faults.scenario_runner import Scenario, ScenarioContext

TOPIC, GROUP = "access", "hits"
LEGACY = Assignment(TOPIC, 0, "legacy")
PARTITIONS = 2
TRIES = 5
PAUSED = "pause:access/*/hits"
FAR = 9_000_000_000_000  # unix ms, far in the future
DONE, PROBLEMS, REDIS, REFUSED = 0, 1, 4, 8

VERBS = (
    "topic create access --partitions 2",
    "topic create fresh --partitions 3",
    "topic settings access retention.max_age=1h",
    "topic grow idle 4 --no-wait --yes",
    "topic delete access --force --while-consumed --yes",
    "group reset access hits --to earliest --drop-retries --force --yes",
    "group delete access hits --force --yes",
    "group adopt access legacy --yes",
    "dlq replay access --all --yes",
    "dlq replay access --all --to-topic idle --yes",
    "dlq purge access --all --yes",
    "dlq export access --yes",
    "retry now access hits --all",
    "retry cancel access hits --all --yes",
    "retry cancel access hits --all --drop --yes",
    "trim access --max-length 0 --yes",
    "pause access/0/hits",
    "resume access/hits",
    "move access/0/hits west-1",
    "group stop access hits",
    "group start access hits",
    "drain west-1",
    "rebalance",
    "reload west-1",
    f"control clear {PAUSED} --yes",
    "schedule add nightly --topic idle --every 1d",
    "schedule edit hourly --every 2h",
    "schedule pause hourly",
    "schedule resume held",
    "schedule remove hourly --yes",
    "schedule prune --yes",
)
READING = (
    "topic list",
    "topic describe access",
    "group list",
    "group describe access hits",
    "partitions",
    "pending access -g hits",
    "tail access",
    "dlq list access",
    "dlq show access 0:1-0",
    "dlq stats access",
    "retry list access hits",
    "status",
    "status access",
    "why access/0/hits",
    "why access",
    "trace access/0/1-0",
    "schedule list",
    "schedule show hourly",
    "schedule next hourly",
)


def seed(context: ScenarioContext) -> None:
    """Create two topics, a live instance, and a group with messages in every place."""
    link, keys = context.link, context.keys
    topics.create(Store(link, keys), "idle", config.Topic(partitions=PARTITIONS))
    topics.create(Store(link, keys), TOPIC, config.Topic(partitions=PARTITIONS))
    offers = {"offers": [[TOPIC, GROUP]], "weight": 1, "cap": 0}
    assert link.run(members.heartbeat(keys, "default", "west-1", "n1", offers, 60.0)).word == "OK"
    assert link.run(directives.change(keys, "default", PAUSED, by="ops")).word == "OK"
    for name in ("hourly", "held"):
        schedules.add(context.store, "default", {"name": name, "topic": "idle", "every": 3600.0})
    schedules.pause(context.store, ["held"])
    for number in range(PARTITIONS):
        harness = Harness(link, keys, Assignment(TOPIC, number, GROUP))
        harness.groups()
        harness.do("XGROUP", "CREATE", harness.stream, "legacy", "0")
        for entry in range(1, 5):
            harness.add(f"{entry}-0")
        harness.do("XACK", harness.stream, GROUP, *harness.fetch(2))
        harness.fetch(1)
        read = ("XREADGROUP", "GROUP", "legacy", "them", "COUNT", 2, "STREAMS", harness.stream, ">")
        harness.do(*read)
        for entry in (1, 2):
            harness.do("ZADD", harness.delayed, FAR, f"m:{entry}-9")
            harness.do("HSET", harness.items, f"m:{entry}-9", b"\x92\xa7payload\xa1x")
            letter = ("payload", f"{number} {entry}", "group", GROUP, "reason", "attempts")
            letter += ("originalId", f"{entry}-0", "originalTopic", TOPIC)
            harness.add(f"{entry}-0", *letter, "originalPartition", str(number), stream=harness.dlq)


def make_scenario(
    line: str,
    *good: int,
    prepare: Callable[[ScenarioContext], None] = lambda _stage: None,
    judge: Callable[[ScenarioContext], None] = lambda _stage: None,
) -> Scenario:
    """Return a scenario that runs one command. Without faults, the command succeeds."""

    def scenario(context: ScenarioContext) -> None:
        seed(context)
        prepare(context)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "streamq.toml"
            path.write_text(f'[redis]\nurl = "{context.proxy.url}"\n')
            codes = []
            while (not codes or codes[-1] == REDIS) and len(codes) < TRIES:
                result = CliRunner().invoke(cli, ["--config", str(path), *line.split()])
                assert "Traceback" not in result.stderr
                codes.append(result.exit_code)
        # If the command is repeated after it has completed, it may report that nothing is left to
        # do.
        allowed = good if context.trigger is None else (*good, REFUSED)
        assert codes[-1] in allowed, f"{line}: {codes} {result.output}"
        judge(context)
        # The audit log contains every attempt.
        for topic in (TOPIC, "idle"):
            context.link.execute("DEL", context.keys.audit(topic))

    scenario.__name__ = "_".join(word for word in line.replace("/", " ").split() if word[0] != "-")
    return scenario


def sent_by_hand(context: ScenarioContext) -> None:
    """Check that each attempt that reached Redis sent a message with its own time."""
    streams = [context.keys.stream("idle", number) for number in range(PARTITIONS)]
    assert sum(context.link.execute("XLEN", each) for each in streams) in (1, 2)
    context.link.execute("DEL", *streams)


CHANGING: tuple[Scenario, ...] = (
    *(make_scenario(line, DONE) for line in VERBS),
    make_scenario("schedule run hourly", DONE, judge=sent_by_hand),
)
LOOKING: tuple[Scenario, ...] = tuple(make_scenario(line, DONE, PROBLEMS) for line in READING)
