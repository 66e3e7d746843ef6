"""Log lines are one per event, cannot be forged and never block. Records of handlers are marked."""

from __future__ import annotations

import ast
import fcntl
import io
import json
import logging
import math
import os
import pty
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

import pytest

import streamqd
from streamqd import logs
from streamqd.logs.events import SECTIONS
from streamqd.logs.sink import Sink
from streamqd.model import Assignment
from tests.support.sources import module

PACKAGE = Path(streamqd.__file__).parent


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    factory = logging.getLogRecordFactory()
    logger = logging.getLogger("streamqd")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logs.close()
    logger.handlers[:], logger.level, logger.propagate = before
    logging.setLogRecordFactory(factory)
    logs.current.message = None


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    yield reader, writer
    logs.close()
    for descriptor in (reader, writer):
        os.close(descriptor)


def read_all(reader: int) -> str:
    parts = []
    while True:
        try:
            part = os.read(reader, 1 << 20)
        except BlockingIOError:
            break
        if not part:
            break
        parts.append(part)
    return b"".join(parts).decode()


def test_json_line_carries_event_process_and_fields(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    logs.setup(role="supervisor", fd=writer)

    logs.event(
        "lease.acquired", assignment=Assignment("access", 3, "hits"), epoch=7, owner=None, late=0.25
    )

    (line,) = read_all(reader).splitlines()
    shown = json.loads(line)
    assert shown.pop("ts").endswith("Z")
    assert shown == {
        "level": "info",
        "event": "lease.acquired",
        "pid": os.getpid(),
        "role": "supervisor",
        "topic": "access",
        "partition": 3,
        "group": "hits",
        "epoch": 7,
        "late": 0.25,
    }


def test_log_style_on_a_terminal_is_text() -> None:
    main, terminal = pty.openpty()
    try:
        logs.setup(role="supervisor", fd=terminal)
        logs.event("signal.received", logging.WARNING, name_of="SIG TERM")
        line = os.read(main, 4096).decode()
    finally:
        logs.close()
        os.close(main)
        os.close(terminal)
    found = re.fullmatch(r"(\S+) +(\d\d:\d\d:\d\d\.\d{3}) WARNING (.*)\r\n", line)
    assert found is not None, line
    assert found[1] == "signal.received", "the event is the first word"
    assert found[3] == f'supervisor[{os.getpid()}] name_of="SIG TERM"'


@pytest.mark.parametrize("style", ["json", "text"])
@pytest.mark.parametrize(
    "evil",
    [
        'x\r\n{"event":"drain.finished"}',
        "x\n12:00:00.000 INFO supervisor drained",
        "x\u2028drained",
        "x\x85drained",
        "\x1b[2Jdrained",
        "\u202edeniard",
        "\ud800 lone",
    ],
)
def test_log_value_cannot_forge_a_line(pipe: tuple[int, int], style: str, evil: str) -> None:
    reader, writer = pipe
    logs.setup(role="supervisor", style=style, fd=writer)

    logs.event("message.dead_lettered", error=evil, nested={"a": [evil]})
    logging.getLogger("streamqd.elsewhere").warning("said %s", evil)

    raw = read_all(reader)
    lines = raw.splitlines()  # splits at all that a reader may take for a line end
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)
    if style == "json":
        assert json.loads(lines[0])["event"] == "message.dead_lettered"
        assert "event" not in json.loads(lines[1])


def test_log_traceback_stays_within_its_event(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    logs.setup(role="worker", style="text", fd=writer)
    try:
        raise ValueError("bad\nlease.lost topic=x")
    except ValueError as error:
        logs.event("housekeeper.failed", logging.ERROR, exc=error)

    first, *rest = read_all(reader).splitlines()
    assert "housekeeper.failed" in first
    assert any("ValueError: bad" in line for line in rest)
    assert all(line.startswith("    ") for line in rest)

    logs.setup(role="worker", style="json", fd=writer)
    logs.event("housekeeper.failed", exc=ValueError("bad"))
    assert "ValueError" in json.loads(read_all(reader))["traceback"]


def test_unregistered_log_event_raises() -> None:
    with pytest.raises(AssertionError, match=r"lease\.aquired"):
        logs.event("lease.aquired")  # event-test: deliberately unknown
    with pytest.raises(AssertionError, match="pid"):
        logs.event("daemon.started", pid=3)


def test_log_lines_are_bounded(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    logs.setup(role="supervisor", style="text", fd=writer)
    logs.event("message.dead_lettered", **{f"field{n}": "x" * 10_000 for n in range(20)})
    assert len(read_all(reader)) < 17_000


def test_value_without_a_text_is_logged_anyway(pipe: tuple[int, int]) -> None:
    class Hostile:
        def __str__(self) -> str:
            raise RuntimeError("no")

    reader, writer = pipe
    logs.setup(role="supervisor", style="json", fd=writer)
    logs.event("message.dead_lettered", value=Hostile())
    logs.event("drain.finished")
    lines = read_all(reader).splitlines()
    assert json.loads(lines[-1])["event"] == "drain.finished"


# --- JSON that every parser accepts ---------------------------------------------------------------


def _parsed(raw: str) -> list[dict[str, Any]]:
    """Return the lines of a JSON log as jq parses them. Python must parse them in the same way."""
    found = [json.loads(line) for line in raw.splitlines()]
    if jq := shutil.which("jq"):
        read = subprocess.run([jq, "-c", "."], input=raw.encode(), capture_output=True, check=True)
        assert [json.loads(line) for line in read.stdout.splitlines()] == found
    return found


def test_json_keeps_letters_and_escapes_surrogates(pipe: tuple[int, int]) -> None:
    """Letters are kept, so that a search finds "Zoë" in the log.

    Lone surrogates are escaped, so that `jq` can parse their line.
    """
    reader, writer = pipe
    logs.setup(role="supervisor", style="json", fd=writer)
    logs.event(
        "message.dead_lettered", error="Zoë 佐伊 😀 \ud800 \x7f\u200b\U000e0041", late=math.nan
    )
    raw = read_all(reader)
    assert "Zoë 佐伊 😀" in raw
    (line,) = _parsed(raw)
    assert line["error"] == "Zoë 佐伊 😀 \\ud800 \x7f\u200b\U000e0041"
    assert line["late"] == "nan"


_PRINTED_BY_PYTHON = """
import logging, sys, threading, warnings
from streamqd import logs

class Unraisable:
    def __del__(self):
        raise ValueError("in __del__")

def failing():
    raise ValueError("in a thread")

logs.setup(role="supervisor", style="json")
warnings.warn("old and Zoë", FutureWarning)
thread = threading.Thread(target=failing, name="lane-1")
thread.start()
thread.join()
Unraisable()
logging.getLogger("library").error("with no handler")
raise KeyError("at the end")
"""


def test_python_messages_are_logged_as_json() -> None:
    """Warnings, uncaught exceptions and records of loggers without a handler become JSON lines."""
    ran = subprocess.run([sys.executable, "-c", _PRINTED_BY_PYTHON], capture_output=True)
    warned, thread, unraisable, library, end = _parsed(ran.stderr.decode())
    assert (warned["logger"], warned["level"]) == ("py.warnings", "warning")
    assert warned["msg"].endswith("FutureWarning: old and Zoë")
    assert (thread["event"], thread["thread"]) == ("process.failed", "lane-1")
    assert "in __del__" in unraisable["traceback"]
    assert (library["logger"], library["msg"]) == ("library", "with no handler")
    assert "at the end" in end["traceback"]


def test_close_restores_the_hooks_of_python(pipe: tuple[int, int]) -> None:
    def hooks() -> list[Any]:
        return [
            *(sys.excepthook, sys.unraisablehook, threading.excepthook),
            *(warnings.showwarning, logging.lastResort),
        ]

    before = hooks()
    logs.setup(role="supervisor", style="json", fd=pipe[1])
    assert not [each for each in hooks() if each in before]
    logs.close()
    assert hooks() == before


def test_failed_log_record_is_reported_as_json(pipe: tuple[int, int]) -> None:
    """A record that cannot be written is reported, and the report is also a JSON line."""

    class Hostile:
        def __str__(self) -> str:
            raise RuntimeError("no")

    reader, writer = pipe
    logs.setup(role="supervisor", style="json", fd=writer)
    logs.event("message.dead_lettered", value=Hostile())
    (line,) = _parsed(read_all(reader))
    assert (line["event"], line["lines"], line["error"]) == ("log.dropped", 1, "RuntimeError")


# --- a reader that does not read ------------------------------------------------------------------


def _endpoints(kind: str) -> tuple[int, int]:
    if kind == "pipe":
        reader, writer = os.pipe()
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
        return reader, writer
    if kind == "file":
        with tempfile.TemporaryFile() as file:
            return os.open(os.devnull, os.O_RDONLY), os.dup(file.fileno())
    left, right = socket.socketpair()
    return left.detach(), right.detach()


@pytest.mark.fault("F34")
@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_unread_log_never_blocks_and_reports_its_loss(kind: str) -> None:
    reader, writer = _endpoints(kind)
    try:
        logs.setup(role="supervisor", style="json", fd=writer)
        began = time.monotonic()
        for number in range(20_000):
            logs.event("lease.acquired", epoch=number)
        assert time.monotonic() - began < 20
        lost = logs.count_dropped()
        assert lost > 10_000
        assert os.get_blocking(writer), "the shared descriptor itself must stay as it was"

        os.set_blocking(reader, False)
        text = ""
        while len(text.splitlines()) < 20_000 - lost + 1:
            part = read_all(reader)
            logs.flush()
            text += part
        shown = [json.loads(line) for line in text.splitlines()]
        told = [line for line in shown if line["event"] == "log.dropped"]
        assert [line["lines"] for line in told] == [lost]
        epochs = [line["epoch"] for line in shown if line["event"] == "lease.acquired"]
        assert epochs == list(range(20_000 - lost)), "the first lines are whole and in order"
    finally:
        logs.close()
        os.close(reader)
        os.close(writer)


def test_log_survives_a_closed_reader_and_descriptor() -> None:
    reader, writer = os.pipe()
    logs.setup(role="supervisor", style="json", fd=writer)
    os.close(reader)
    logs.event("daemon.started")
    assert logs.count_dropped() == 1
    logs.close()
    os.close(writer)
    logs.setup(role="supervisor", style="auto", fd=writer)
    logs.event("daemon.started")
    assert logs.count_dropped() == 1


def test_log_appends_to_a_file_shared_with_others(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        logs.setup(role="supervisor", style="json", fd=file.fileno())
        os.write(file.fileno(), b"printed\n")
        logs.event("daemon.started")
        os.write(file.fileno(), b"printed again\n")
    first, second, third = path.read_text().splitlines()
    assert (first, third) == ("printed", "printed again")
    assert json.loads(second)["event"] == "daemon.started"


_FULL_DISK = """
import os, resource, sys
from streamqd.logs.events import SECTIONS
from streamqd.logs.sink import Sink
def room(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
sink = Sink(fd)
sink.write("1" * 50)
room(70)
sink.write("2" * 50)
sink.write("3" * 50)
room(resource.RLIM_INFINITY)
sink.write("4" * 50)
sink.write("5" * 50)
"""


def test_log_record_after_a_cut_one_starts_a_new_line(tmp_path: Path) -> None:
    """After a cut record, the next one starts a new line. No reader could parse a shared line."""
    file = tmp_path / "log"
    subprocess.run([sys.executable, "-c", _FULL_DISK, str(file)], check=True)
    assert file.read_text().split("\n") == ["1" * 50, "2" * 19, "4" * 50, "5" * 50, ""]


@pytest.mark.parametrize("kind", ["pipe", "file", "socket"])
def test_log_lines_after_close_are_dropped(kind: str) -> None:
    """After the log is closed, each write returns without an error."""
    reader, writer = _endpoints(kind)
    sink = Sink(writer)
    os.close(writer)
    for _ in range(3):
        sink.write("a line")
    sink.flush(5.0)
    assert sink.dropped == 3
    os.close(reader)


@pytest.mark.parametrize("kind", ["pipe", "file", "socket"])
@pytest.mark.parametrize("own", [False, True], ids=["shared", "all"])
def test_log_lines_never_reach_a_socket_with_the_same_number(kind: str, own: bool) -> None:
    """Log lines never reach a socket.

    If user code closes standard error, the next connection gets its descriptor number.
    """
    reader, writer = _endpoints(kind)
    sink = Sink(writer)
    if own:
        sink.write("before")
    numbers = {writer, sink._own} if own else {writer}
    for number in numbers:
        os.close(number)
    sockets = []
    while not numbers <= {each.fileno() for pair in sockets for each in pair}:
        sockets.append(socket.socketpair())
    for _ in range(3):
        sink.write("a line")
    sink.flush(0.1)
    assert sink.dropped == 3
    for pair in sockets:
        for each in pair:
            each.setblocking(False)
            with pytest.raises(BlockingIOError):
                each.recv(100)
    sink.close()
    assert all(each.fileno() >= 0 and _is_open(each.fileno()) for pair in sockets for each in pair)
    for pair in sockets:
        for each in pair:
            each.close()
    os.close(reader)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_log_survives_a_closed_standard_error() -> None:
    """The worker opens its own descriptor of the log before user code runs, so the log survives."""
    reader, writer = os.pipe()
    logs.setup(role="supervisor", style="json", fd=writer)
    os.close(writer)
    logs.event("daemon.started")
    logs.close()
    assert json.loads(os.read(reader, 4096))["event"] == "daemon.started"
    os.close(reader)


_SHARED_DISK = """
import os, resource, sys
from streamqd.logs.events import SECTIONS
from streamqd.logs.sink import Sink
def room(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
sink = Sink(fd)
sink.write("1" * 50)
if os.fork() == 0:
    room(70)
    sink.write("2" * 50)
    os._exit(0)
os.wait()
sink.write("3" * 50)
sink.write("4" * 50)
"""


def test_log_line_cut_by_another_process_loses_no_line(tmp_path: Path) -> None:
    """The next process starts a new line, so its record does not become part of the cut one."""
    file = tmp_path / "log"
    subprocess.run([sys.executable, "-c", _SHARED_DISK, str(file)], check=True)
    assert file.read_text().split("\n") == ["1" * 50, "2" * 19, "3" * 50, "4" * 50, ""]


def test_first_log_line_after_a_cut_file_is_whole(tmp_path: Path) -> None:
    """After a full disk, a restarted daemon starts a new line after the record that was cut off."""
    path = tmp_path / "log"
    path.write_text("cut")
    for _ in range(2):
        with path.open("ab") as file:
            sink = Sink(file.fileno())
            sink.write("whole")
            sink.close()
    assert path.read_text() == "cut\nwhole\nwhole\n"


def test_interrupted_log_line_is_sent_whole() -> None:
    """An interrupted line is sent as a whole.

    Otherwise, its rest could follow the line of another process.
    """
    reader, writer = _endpoints("pipe")
    sink = Sink(writer)
    sink.write("1" * 6000)
    sink.write("2" * 6000)
    read = os.read(reader, 4096)
    pid = os.fork()
    if pid == 0:
        sink.write("3")
        os._exit(0)
    os.waitpid(pid, 0)
    os.set_blocking(reader, False)
    while part := read_all(reader):
        read += part.encode()
        sink.flush(0.1)
    lines = read.decode().split("\n")
    assert "3" in lines
    assert lines.count("1" * 6000) == 1
    assert lines.count("2" * 6000) == 1
    sink.close()
    os.close(reader)
    os.close(writer)


def test_repeated_findings_are_logged_once_per_episode(pipe: tuple[int, int]) -> None:
    """Even 50,000 directives take few lines. A value is logged again only if it changes."""
    reader, writer = pipe
    logs.setup(role="supervisor", style="json", fd=writer)
    once = logs.Once("directive.ignored")
    found = {f"junk:{n}": {"order": f"junk:{n}"} for n in range(50_000)}
    for _ in range(3):
        once.report(found)
    once.report(found | {"junk:7": {"order": "junk:7", "problem": "another"}})
    once.report({})
    once.report({"junk:7": {"order": "junk:7"}})
    told = [json.loads(line) for line in os.read(reader, 65536).splitlines()]
    assert [line.get("more") for line in told] == [*[None] * 10, 49_990, None, None]


def test_forked_child_drops_the_log_buffer_of_its_parent() -> None:
    reader, writer = _endpoints("pipe")
    try:
        logs.setup(role="supervisor", style="json", fd=writer)
        for _ in range(100):
            logs.event("daemon.started")
        pid = os.fork()
        if pid == 0:
            os.closerange(3, reader)
            logs.set_role("worker")
            os.set_blocking(reader, False)
            read_all(reader)
            logs.event("worker.started")
            os._exit(0 if logs.count_dropped() == 0 else 1)
        assert os.waitpid(pid, 0)[1] == 0
        os.set_blocking(reader, False)
        (line,) = read_all(reader).splitlines()
        assert json.loads(line)["event"] == "worker.started"
        assert json.loads(line)["role"] == "worker"
    finally:
        logs.close()
        os.close(reader)
        os.close(writer)


# --- episodes -------------------------------------------------------------------------------------


def test_episode_is_logged_at_start_and_end(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    logs.setup(role="supervisor", style="json", fd=writer)
    episode = logs.Episode("redis.lost", "redis.recovered")
    episode.log_recovery()
    for _ in range(50):
        episode.log_failure(error="refused")
    assert episode.open
    episode.log_recovery()
    episode.log_recovery()
    lost, back = (json.loads(line) for line in read_all(reader).splitlines())
    assert (lost["event"], lost["level"]) == ("redis.lost", "warning")
    assert (back["event"], back["failures"]) == ("redis.recovered", 50)
    assert back["seconds"] >= 0


# --- records of handlers --------------------------------------------------------------------------


class _Message:
    uid = "access/3/1-0"
    attempt = 2


def _user_logger(stream: io.StringIO, pattern: str) -> logging.Logger:
    logger = logging.Logger("shop")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter(pattern))
    logger.addHandler(handler)
    return logger


def test_handler_log_records_have_message_attributes() -> None:
    logs.mark_records("shop:sell", Assignment("access", 3, "hits"))
    stream = io.StringIO()
    logger = _user_logger(stream, "%(uid)s %(attempt)s %(handler)s %(message)s")

    logs.current.message = _Message()
    logger.warning("sold")
    logs.current.message = None
    logger.warning("idle")

    assert stream.getvalue().splitlines() == [
        "access/3/1-0 2 shop:sell sold",
        "None None shop:sell idle",
    ]


def test_extra_of_a_handler_overrides_message_attributes() -> None:
    logs.mark_records("shop:sell", Assignment("access", 3, "hits"))
    stream = io.StringIO()
    logger = _user_logger(stream, "%(uid)s %(order)s")
    logs.current.message = _Message()
    logger.warning("sold", extra={"uid": "mine", "order": 5})
    assert stream.getvalue() == "mine 5\n"
    with pytest.raises(KeyError):
        logger.warning("sold", extra={"name": "taken"})


def test_log_setup_leaves_the_root_logger_alone(pipe: tuple[int, int]) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level, root.filters[:]
    reader, writer = pipe
    logs.setup(role="supervisor", fd=writer)
    logs.mark_records("shop:sell", Assignment("access", 3, "hits"))
    logs.event("daemon.started")
    logging.getLogger("shop").warning("not ours")
    assert (root.handlers, root.level, root.filters) == before
    assert len(read_all(reader).splitlines()) == 1


# --- the registry ---------------------------------------------------------------------------------


def _sources() -> list[tuple[Path, ast.Module]]:
    return [
        (path, module(path)) for path in sorted(PACKAGE.rglob("*.py")) if path.name != "events.py"
    ]


def _strings(node: ast.AST) -> set[str]:
    return {
        child.value
        for child in ast.walk(node)
        if isinstance(child, ast.Constant) and isinstance(child.value, str)
    }


def _calls(tree: ast.Module) -> Iterator[tuple[ast.Call, str]]:
    """Return all calls, each with the last part of the name that it calls."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            called: Any = call.func
            yield call, getattr(called, "attr", None) or getattr(called, "id", None) or ""


def _names(argument: ast.expr) -> set[str]:
    """Return the literal strings that an argument can have as its value."""
    if isinstance(argument, ast.IfExp):
        return _strings(argument.body) | _strings(argument.orelse)
    return _strings(argument)


def _levels(argument: ast.expr) -> set[str]:
    """Return the levels that an argument such as `logging.INFO` can have as its value."""
    return {each.attr.lower() for each in ast.walk(argument) if _is_level(each)}


def _is_level(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and node.attr in logging.getLevelNamesMapping()


def _named_events(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Return the literal names that are passed to `event(…)`, `logs.event(…)` and `Episode(…)`."""
    for call, name in _calls(tree):
        for argument in call.args[: {"event": 1, "Episode": 2}.get(name, 0)]:
            yield from ((found, call.lineno) for found in _names(argument))


class LoggedEvents:
    """The levels and fields of each event in the calls of `event`, as far as they are literal.

    An event is `complete` if no other code contains its name and no call unpacks fields.
    """

    def __init__(self) -> None:
        self.levels: dict[str, set[str]] = {}
        self.fields: dict[str, set[str]] = {}
        self.complete: set[str] = set(logs.EVENTS)
        for _, tree in _sources():
            calls = [call for call, name in _calls(tree) if name == "event" and call.args]
            inside = {id(node) for call in calls for node in ast.walk(call.args[0])}
            self.complete -= {
                node.value
                for node in ast.walk(tree)
                if isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in inside
            }
            for call in calls:
                self._add(call)

    def _add(self, call: ast.Call) -> None:
        for name in _names(call.args[0]) & logs.EVENTS.keys():
            levels = self.levels.setdefault(name, set())
            # If both the name and the level depend on a condition, they are in the same order.
            level = call.args[1] if len(call.args) > 1 else None
            if isinstance(call.args[0], ast.IfExp) and isinstance(level, ast.IfExp):
                level = level.body if name in _names(call.args[0].body) else level.orelse
            levels |= _levels(level) if level else {"info"}
            fields = self.fields.setdefault(name, set())
            for keyword in call.keywords:
                if keyword.arg == "assignment":
                    fields |= {"topic", "partition", "group"}
                elif keyword.arg is None:
                    self.complete.discard(name)
                elif keyword.arg not in ("exc", "trace"):
                    fields.add(keyword.arg)


def test_every_event_in_the_code_is_registered() -> None:
    unknown = [
        f"{path.relative_to(PACKAGE)}:{line} {name}"
        for path, tree in _sources()
        for name, line in _named_events(tree)
        if name not in logs.EVENTS
    ]
    assert unknown == []


def test_every_registered_event_is_used() -> None:
    used = set().union(*(_strings(tree) for _, tree in _sources()))
    assert sorted(logs.EVENTS.keys() - used) == []


def test_log_event_registry_is_sorted_and_explained() -> None:
    assert len(logs.EVENTS) == sum(map(len, SECTIONS.values()))
    for section in SECTIONS.values():
        assert list(section) == sorted(section)
    for name, found in logs.EVENTS.items():
        assert name == name.lower()
        assert name.replace(".", "").replace("_", "").isalpha()
        assert found.meaning.endswith(".")
        assert len(found.fields) == len(set(found.fields)), name
        assert logs.RESERVED.isdisjoint(found.fields), name


def test_registered_levels_and_fields_are_those_of_the_calls() -> None:
    calls = LoggedEvents()
    assert len(calls.complete) > 80
    wrong = []
    for name, found in logs.EVENTS.items():
        levels, fields = set(found.level.split(", ")), set(found.fields)
        called = calls.levels.get(name, set()), calls.fields.get(name, set())
        if (
            called != (levels, fields)
            if name in calls.complete
            else not (called[0] <= levels and called[1] <= fields)
        ):
            wrong.append((name, called))
    assert wrong == []


def test_fields_in_the_meaning_of_an_event_are_registered() -> None:
    """A meaning names its fields, settings, commands and other events as code."""
    settings = {"max_rss", "timeout"}  # these are names of fields as well
    fields = {field for found in logs.EVENTS.values() for field in found.fields} - settings
    wrong = [
        (name, word)
        for name, found in logs.EVENTS.items()
        for word in re.findall(r"`(\w+)`", found.meaning)
        if word in fields and word not in found.fields
    ]
    assert wrong == []
