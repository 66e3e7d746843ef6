"""The daemon as a process: configured, started, watched through its log, and always stopped.

`Daemon` writes a configuration and a handler module to a folder, and runs the real command there.
Tests wait for events in its log, for records of the ledger, or for facts in Redis.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Self

import psutil

from streamqd import config, process
from streamqd.errors import RedisUnavailableError
from streamqd.model import Assignment, Uid
from streamqd.producer import Outgoing, Producer
from streamqd.scoreboard import WorkerState
from streamqd.store import messages, topics
from streamqd.store.client import connect
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from streamqd.supervisor import scoreboard_file
from tests.support import users
from tests.support.ledger import VARIABLE, Ledger
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
PAYLOAD_HANDLER = Path(__file__).with_name("payload_handler.py")
TOPIC, GROUP = "orders", "bill"
KILL_SECONDS = 10.0
UNREAD_MAX = 100_000  # if a partition has more messages, they are not counted

Event = dict[str, Any]

# Matches a record of the daemon, but not a message that imitates one.
RECORD = re.compile(r'\{"event":"[a-z._]+","ts":"[^"]+","level":.*')


class Daemon:
    """A configured daemon. `start` may be called again after the daemon has exited.

    Settings of `[redis]`, `[daemon]`, the topic and its consumer are given in the same form as in
    TOML. `code` becomes the handler module `work`; the default is a copy of
    tests/support/payload_handler.py.
    """

    def __init__(
        self,
        folder: Path,
        redis_url: str,
        *,
        partitions: int = 1,
        redis: Mapping[str, Any] | None = None,
        daemon: Mapping[str, Any] | None = None,
        consumer: Mapping[str, Any] | None = None,
        groups: Iterable[str] = (GROUP,),
        http: str = "",
        code: str = "",
        name: str = "one",
    ) -> None:
        self.folder = folder
        embedded = redis_url == "embedded:"
        self.partitions = partitions
        self.groups = list(groups)
        self.config_path = folder / f"{name}.toml"
        self.module_path = folder / "work.py"
        self.log_path = folder / f"{name}.log"
        self.ledger = Ledger(folder / "ledger")
        self.keys = Keys()
        self.module = "streamqd"  # the module that is run, and additions to its environment
        self.environment: dict[str, str] = {}
        self.python = sys.executable
        self.within: list[str] = []  # the command that runs the daemon, if any
        one = {"topic": TOPIC, "handler": "work:obey", **(consumer or {})}
        self.tables: dict[str, Any] = {
            "redis": {
                "url": redis_url,
                **({} if embedded else users.redis_section("admin")),
                **(redis or {}),
            },
            "daemon": {"instance": name, "lease_ttl": "60s", **(daemon or {})},
            "http": {"bind": http},
            "log": {"format": "json"},
            "topics": {TOPIC: {"partitions": partitions}},
            "consumers": [{**one, "group": group} for group in self.groups],
        }
        self.write_config()
        self.write_code(code or PAYLOAD_HANDLER.read_text())
        found = config.resolve_url(config.load(self.config_path)).redis
        self.link = connect(replace(found, username=None), timeout=10.0, name="test:daemon")
        self._producer: Producer | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._sessions: list[int] = []
        self._read_to = 0
        self._events: list[Event] = []
        self.plain: list[str] = []  # lines that are not events, such as stacks and tracebacks

    # --- files ---

    @property
    def store(self) -> Store:
        return Store(self.link, self.keys)

    def write_config(self, **changed: Any) -> None:
        """Write the configuration. `changed` replaces whole tables for good."""
        self.tables |= changed
        self.config_path.write_text(toml(self.tables))

    def write_code(self, code: str) -> None:
        """Write the handler module."""
        self.module_path.write_text(code)

    # --- life ---

    def __enter__(self) -> Self:
        self.start()
        self.wait_event("daemon.ready")
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def start(self, *arguments: str) -> None:
        """Start the command. It dies together with the test process."""
        with self.log_path.open("ab") as log:
            self.launch(log, log, *arguments)

    def launch(self, stdout: IO[bytes], stderr: IO[bytes] | int, *arguments: str) -> None:
        """Start the command with an output other than its log."""
        assert not self.running
        parent = os.getpid()
        self._process = subprocess.Popen(
            [*self.within, *self._command(), *arguments],
            cwd=self.folder,
            env=self._acting() | self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=lambda: process.die_with_parent(parent),
        )
        self._sessions.append(self._process.pid)

    def _user(self, name: str) -> dict[str, str]:
        return {} if self.tables["redis"]["url"] == "embedded:" else users.redis_section(name)

    def _acting(self) -> dict[str, str]:
        """Return the environment in which the daemon uses its own user, not that of commands."""
        user = self._user("daemon")
        return {"STREAMQ_REDIS__USERNAME": user["username"]} if user else {}

    def _command(self) -> list[str]:
        return [self.python, "-m", self.module, "--config", self.config_path.name]

    def _environment(self) -> dict[str, str]:
        clean = {name: text for name, text in os.environ.items() if not name.startswith("STREAMQ_")}
        return clean | {
            **self.environment,
            VARIABLE: str(self.ledger.path),
            "PYTHONPATH": str(ROOT),
            # If a module is rewritten within one second, its cached version must not be loaded.
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    @property
    def pid(self) -> int:
        """The pid of the supervisor."""
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        """True while the supervisor is running."""
        return self._process is not None and self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the supervisor."""
        assert self.running, f"the daemon exited with {self.wait(0)}\n{self.tail()}"
        os.kill(self.pid, number)

    def wait(self, timeout: float = 20.0) -> int:
        """Wait until it exits, and return the exit code. Fail if a process of it is left."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {timeout:g} s\n{self.tail()}") from None
        self.wait_gone(2.0)
        return code

    def stop(self, timeout: float = 20.0) -> int:
        """Drain the daemon with SIGTERM, and return the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout)

    def kill(self) -> None:
        """Kill only the supervisor."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(KILL_SECONDS)

    def lose_memory(self) -> None:
        """Remove the shared memory of a killed supervisor, as the loss of its host would."""
        folder = scoreboard_file.folder(os.environ | self.environment, os.geteuid())
        for path in folder.glob(f"*{scoreboard_file.SUFFIX}") if folder else ():
            # The daemon of another test may have removed the file already.
            with contextlib.suppress(FileNotFoundError):
                with path.open("rb") as file:  # hundreds of megabytes, empty except at the start
                    page = file.read(scoreboard_file.BOARD_BYTES)
                header = scoreboard_file.unpack_header(page[scoreboard_file.HEADER_OFFSET :])
                if Path(header["lock_file"]).is_relative_to(self.folder):
                    path.unlink()

    def wait_gone(self, timeout: float) -> None:
        """Wait until all processes of the daemon's session have exited."""
        try:
            wait_until(lambda: not self.session(), timeout=timeout)
        except AssertionError:
            left = [f"{each.pid} {each.as_dict(['name', 'cmdline'])}" for each in self.session()]
            raise AssertionError(f"left after {timeout:g} s: {left}\n{self.tail()}") from None

    def close(self) -> None:
        """Kill the daemon's remaining processes, and no others."""
        self.kill_all()
        self.link.close()
        if self._producer is not None:
            self._producer.close()
        self.ledger.close()

    def kill_all(self) -> None:
        """Kill all processes of the daemon, as a power loss does."""
        if self.running:
            self.kill()

        def gone() -> bool:
            left = self.session()
            for each in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            return not left

        wait_until(gone, timeout=KILL_SECONDS, what="every process of the daemon is dead")

    # --- processes ---

    def session(self) -> list[psutil.Process]:
        """Return all live processes that the daemon started, including those with a new parent.

        They share the session that was created when the daemon started.
        """
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(pid) in self._sessions:
                    one = psutil.Process(pid)
                    if one.status() != psutil.STATUS_ZOMBIE:
                        found.append(one)
        return found

    def titles(self) -> dict[str, int]:
        """Return the pids of the supervisor and its children, by process title."""
        supervisor = psutil.Process(self.pid)
        found = {}
        for one in (supervisor, *supervisor.children()):
            with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                found[one.cmdline()[0]] = one.pid
        return found

    def pids(self, group: str = GROUP) -> dict[int, int]:
        """Return the pids of a group's workers, by partition."""
        titles = self.titles()
        found = {
            number: titles.get(f"streamqd: worker {TOPIC}/{number} {group}")
            for number in range(self.partitions)
        }
        return {number: pid for number, pid in found.items() if pid is not None}

    def long_poll(self, partition: int = 0) -> str:
        """Return the id of the connection on which a worker is waiting for messages, or ''."""
        name = f" name=streamqd:{Assignment(TOPIC, partition, GROUP)} "
        for line in self.link.execute("CLIENT", "LIST").decode().splitlines():
            told = dict(word.partition("=")[::2] for word in line.split())
            if name in line and "b" in told["flags"]:
                return told["id"]
        return ""

    def worker_states(self) -> set[object]:
        """Return the states of the workers, as a dump reports them."""
        mark = self.mark()
        self.signal(signal.SIGUSR1)
        count = len(self.assignments())
        self.wait_for(lambda: len(self.events("state.dumped", mark)) >= count, what="the state")
        return {each["worker"] for each in self.events("state.dumped", mark)}

    def pause(self) -> None:
        """Pause all workers with SIGTSTP, and wait until they have paused."""
        self.signal(signal.SIGTSTP)
        self.wait_for(lambda: self.worker_states() == {WorkerState.PAUSED}, what="it pauses")

    # --- the log ---

    def events(self, name: str = "", after: int = 0, **fields: Any) -> list[Event]:
        """Return the events logged so far that have this name and these fields.

        `number` is the position of an event in the log.
        """
        self._read_log()
        return [
            event
            for event in self._events[after:]
            if (not name or event["event"] == name)
            and all(event.get(key) == value for key, value in fields.items())
        ]

    def mark(self) -> int:
        """Return the number of events so far, to be passed as `after`."""
        return len(self.events())

    def wait_event(
        self, name: str, *, after: int = 0, timeout: float = 15.0, **fields: Any
    ) -> Event:
        """Wait for an event, and return the first one that matches."""
        self.wait_for(
            lambda: self.events(name, after, **fields) or not self.running,
            timeout=timeout,
            what=f"the event {name} {fields}",
        )
        found = self.events(name, after, **fields)
        assert found, f"the daemon exited without the event {name} {fields}\n{self.tail()}"
        return found[0]

    def wait_for(
        self, condition: Callable[[], object], *, timeout: float = 15.0, what: str, every=0.01
    ) -> Any:
        """Wait in the same way as `wait_until`, but show the log if the wait fails."""
        try:
            return wait_until(condition, timeout=timeout, what=what, every=every)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.tail()}") from None

    def tail(self, lines: int = 40) -> str:
        """Return the last lines of the log, to be shown if a test fails."""
        if not self.log_path.exists():
            return "(no log)"
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def _read_log(self) -> None:
        if not self.log_path.exists():
            return
        with self.log_path.open("rb") as file:
            file.seek(self._read_to)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read_to += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            # Other processes write stacks in pieces, so a record may follow such a piece in the
            # same line.
            found = RECORD.search(line)
            if found:
                self._events.append({**json.loads(found[0]), "number": len(self._events)})
            if stack := line[: found.start()] if found else line:
                self.plain.append(stack)

    # --- messages ---

    def send(
        self, payloads: Iterable[str], partition: int | None = None, expires: float | None = None
    ) -> list[Uid]:
        """Send messages round robin or to one partition, and record each one. Return their uids."""
        if self._producer is None:
            settings = config.load(self.config_path)
            redis = replace(settings.redis, **self._user("producer"))
            self._producer = Producer(settings=replace(settings, redis=redis))
        if self._user("producer"):  # this user may not create topics
            topics.create(self.store, TOPIC, config.Topic(partitions=self.partitions))
        payloads = list(payloads)
        places = [
            number % self.partitions if partition is None else partition
            for number in range(len(payloads))
        ]
        uids = self._producer.send_many(
            TOPIC,
            [
                Outgoing(payload, partition=place, expires=expires)
                for payload, place in zip(payloads, places, strict=True)
            ],
        )
        for uid, payload in zip(uids, payloads, strict=True):
            self.ledger.record_sent(uid, payload)
        return uids

    def wait_run(
        self, uid: str, kind: str = "start", timeout: float = 15.0, count: int = 1
    ) -> None:
        """Wait until the ledger has `count` records of a kind for one message."""
        self.wait_for(
            lambda: len(self.ledger.records_for(uid, kind)) >= count,
            timeout=timeout,
            what=f"{kind} of {uid} is in the ledger {count} times",
            every=0.002,
        )

    def wait_settled(self, timeout: float = 30.0) -> None:
        """Wait until no message is unread, in flight or waiting for a retry."""

        def settled() -> bool:
            # One of several nodes may be unavailable.
            with contextlib.suppress(RedisUnavailableError):
                return self.unsettled() == 0
            return False

        self.wait_for(settled, timeout=timeout, what="everything is settled", every=0.03)

    def unsettled(self) -> int:
        """Return the number of unsettled messages of all groups.

        The number is very large if there are too many messages to count. It is also very large if a
        group is missing, because no message is settled until the group is recreated.
        """
        calls = [
            messages.snapshot(self.keys, assignment, UNREAD_MAX)
            for assignment in self.assignments()
        ]
        found = [messages.Snapshot.parse(reply) for reply in self.link.run_many(calls)]
        return sum(map(_unsettled, found))

    def pending(self, partition: int | None = None, group: str = GROUP) -> int:
        """Return the number of messages that were fetched but not acknowledged."""
        wanted = range(self.partitions) if partition is None else (partition,)
        found = self.link.pipeline(
            [("XPENDING", self.keys.stream(TOPIC, number), group) for number in wanted]
        )
        return sum(one[0] for one in found)

    def pending_uids(self, group: str = GROUP) -> set[str]:
        """Return the uids of messages that were fetched but not acknowledged."""
        found = set()
        for number in range(self.partitions):
            stream = self.keys.stream(TOPIC, number)
            rows = self.link.execute("XPENDING", stream, group, "-", "+", 10_000)
            found |= {f"{TOPIC}/{number}/{row[0].decode()}" for row in rows}
        return found

    def letters(self) -> list[dict[str, str]]:
        """Return all dead letters. Each has its `uid`."""
        found = []
        for number in range(self.partitions):
            for _, flat in self.link.execute("XRANGE", self.keys.dlq(TOPIC, number), "-", "+"):
                text = [part.decode() for part in flat]
                letter = dict(zip(text[::2], text[1::2], strict=True))
                found.append(letter | {"uid": f"{TOPIC}/{number}/{letter['originalId']}"})
        return found

    def epochs(self) -> dict[int, int]:
        """Return the epochs of the fences, by partition."""
        return {
            assignment.partition: int(
                self.link.execute("HGET", self.keys.fence(*assignment), "epoch") or 0
            )
            for assignment in self.assignments()
        }

    def traces(self) -> list[str]:
        """Return the keys that show that a message has failed, crashed or been retried."""
        wanted = []
        for assignment in self.assignments():
            wanted += [self.keys.attempts(*assignment), self.keys.retry(*assignment)]
            if self.link.execute("XLEN", self.keys.retry_stream(*assignment)):
                wanted.append(self.keys.retry_stream(*assignment))
        return [key for key in wanted if self.link.execute("EXISTS", key)]

    def assignments(self) -> list[Assignment]:
        """Return every (topic, partition, group) that the daemon offers."""
        return [
            Assignment(TOPIC, number, group)
            for group in self.groups
            for number in range(self.partitions)
        ]


@contextlib.contextmanager
def daemons(folder: Path, redis_url: str) -> Iterator[Callable[..., Daemon]]:
    """Configure daemons in one folder: `make(partitions=2, consumer={"timeout": "1s"})`.

    `redis_url` is the server that they use by default. All daemons are killed at the end.
    """
    with contextlib.ExitStack() as made:
        yield lambda **options: made.enter_context(
            contextlib.closing(Daemon(folder, **{"redis_url": redis_url} | options))
        )


def toml(tables: Mapping[str, Any]) -> str:
    """Render tables of plain values as TOML. Nested tables become inline tables."""
    lines = []
    for name, table in tables.items():
        several = isinstance(table, list)
        for one in table if several else [table]:
            lines.append(f"[[{name}]]" if several else f"[{name}]")
            lines += [f"{key} = {_value(value)}" for key, value in one.items()]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_value(one)}" for key, one in value.items()) + " }"
    return json.dumps(value)


def _unsettled(found: messages.Snapshot | None) -> int:
    if found is None or min(found.unread, found.retry_unread) < 0:
        return UNREAD_MAX
    return (
        found.unread
        + found.pending
        + found.waiting_retries
        + found.retry_unread
        + found.retry_pending
    )
