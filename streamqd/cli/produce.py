"""`streamqd produce`: send one message, or one message per line of a file or standard input."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import click

from streamqd.cli.arguments import DURATION, Parsed, json_option
from streamqd.cli.lines import STDIN, BadInputError, File, Lines, Payload
from streamqd.cli.output import apply_style, emit
from streamqd.cli.session import Session, pass_session
from streamqd.config.setting import NAME, NAME_HINT
from streamqd.config.values import parse_instant
from streamqd.errors import (
    InvalidRequestError,
    RedisResponseError,
    RedisUnavailableError,
    RequestRefusedError,
    StreamqdError,
    TopicNotFoundError,
)
from streamqd.model import Uid
from streamqd.producer import BatchOutcomeUnknownError, BatchRejectedError, Outgoing, Producer
from streamqd.producer.encoding import encoded_key, to_envelope
from streamqd.store import topics as registry
from streamqd.words import count

EXIT_INPUT = 2
RATE_SECONDS = 0.1  # minimum duration in seconds for which a rate is printed
Key = Callable[[bytes], bytes | None]


def _instant(value: object) -> float:
    """Parse a date and time, and return unix seconds. Without an offset, the time is in UTC."""
    try:
        return parse_instant(str(value))
    except ValueError:
        raise ValueError(
            "is not a time; pass UTC, such as 2026-12-24T18:00, or pass a duration as --delay"
        ) from None


INSTANT = Parsed("time", _instant)


@dataclass
class Produced:
    """The result of `produce`.

    `sent` is the number of confirmed messages. `unknown` is the number of messages that may or may
    not have been written, because the connection was lost. If nothing was sent because the
    --dedup-id was used before, `duplicate` is the uid of the earlier message. Otherwise, it is
    null.

    `lines` is the number of lines that were read, `empty` the number of lines that were skipped,
    and `without_key` the number of messages that were sent although no key was found in them.
    `error` is the reason why the command stopped early, or null if it did not.
    """

    topic: str
    sent: int = 0
    unknown: int = 0
    lines: int = 0
    empty: int = 0
    without_key: int = 0
    duplicate: str | None = None
    seconds: float = 0.0
    error: str | None = None


@click.command(short_help="Send a message, or one message per line.")
@click.argument("topic")
@click.argument("payload", required=False)
@click.option(
    "--from", "source", metavar="FILE|-",
    help="Read the messages from this file, plain or gzip. Default: - (standard input).",
)  # fmt: skip
@click.option(
    "--format",
    "form",
    type=click.Choice(["lines", "jsonl", "file"]),
    default="lines",
    show_default=True,
    help="The format of the input. lines: each line is a message. jsonl: each line must be JSON,"
    " and is sent unchanged. file: the whole file is one message.",
)
@click.option("-k", "--key", "one_key", metavar="KEY", help="The key of every message.")
@click.option(
    "--key-regex",
    metavar="RE",
    help="Take the key of each line from the match of this regular expression: its first group, or"
    " the whole match.",
)
@click.option(
    "--key-field",
    metavar="FIELD",
    help="With --format jsonl: use this field of each object as the key.",
)
@click.option(
    "-p", "--partition", type=click.IntRange(0), help="Send the messages to this partition."
)
@click.option(
    "--delay", type=DURATION, metavar="DURATION", help="Deliver the messages after this time."
)
@click.option(
    "--at", type=INSTANT, metavar="TIME",
    help="Deliver the messages at this time, such as 2026-12-24T18:00:00Z.",
)  # fmt: skip
@click.option(
    "--expires", type=DURATION, metavar="DURATION",
    help="Drop a message that is not handled within this time after its delivery.",
)  # fmt: skip
@click.option(
    "--dedup-id", metavar="ID",
    help="Send nothing if this ID was used in the last 10 minutes. Only for a single message.",
)  # fmt: skip
@click.option(
    "-H", "--header", "headers", metavar="NAME=VALUE", multiple=True,
    help="A header of every message. May be repeated.",
)  # fmt: skip
@click.option(
    "--create/--no-create",
    default=None,
    help="Create a topic that neither exists nor is configured, or fail. Default: ask.",
)
@json_option
@pass_session
def produce(
    session: Session,
    *,
    topic: str,
    payload: str | None,
    source: str | None,
    form: str,
    one_key: str | None,
    key_regex: str | None,
    key_field: str | None,
    partition: int | None,
    delay: float | None,
    at: float | None,
    expires: float | None,
    dedup_id: str | None,
    headers: tuple[str, ...],
    create: bool | None,
    as_json: bool,
) -> int:
    """Send one message, or one for each line of a file.

    \b
      streamqd produce orders '{"id": 1}' --key customer-7
      streamqd produce access --from access.log --key-regex '^(\\S+)'
      streamqd produce images --from cat.png --format file --dedup-id cat-7

    Without PAYLOAD, the command sends each line of --from or standard input as a message, and skips
    empty lines. At the first line that cannot be sent, it prints the number of sent messages and
    exits with code 2. The command asks before it creates a topic that is not in the configuration.
    """
    if payload is not None and source is not None:
        raise click.UsageError("PAYLOAD cannot be used with --from")
    if at is not None and delay is not None:
        raise click.UsageError("--at cannot be used with --delay")
    one = _dedup_id(dedup_id, one=payload is not None or form == "file")
    shared = _message_template(headers, partition, delay, at, expires, one)
    key = _key(form, one_key, key_regex, key_field)
    if not NAME.fullmatch(topic):
        raise InvalidRequestError(f"{topic!r} is not a valid topic name ({NAME_HINT})")
    done = Produced(topic)
    try:
        lines = _source(payload, source, form)
        _check_topic(session, topic, create)
    except (click.UsageError, StreamqdError) as error:
        text = error.format_message() if isinstance(error, click.UsageError) else str(error)
        done.error = text
        if as_json:
            emit(done)
        raise
    if lines.name == STDIN and sys.stdin.isatty():
        one = "one message" if form == "file" else "one message per line"
        session.note(f"{one}; finish with Ctrl-D")
    max_bytes = session.settings.daemon.max_message_bytes
    skip = payload is None and form != "file"
    items = _items(lines, form, key, shared, max_bytes, done, skip=skip)
    with contextlib.closing(lines):
        failure = _deliver(session, lines, items, create, done, quiet=as_json)
    done.error = _describe_failure(failure)
    if as_json:
        emit(done)
    elif done.duplicate:
        session.note(f"not sent again: this --dedup-id was used for {done.duplicate}")
    elif done.sent or not failure:
        _summarise(session, done)
    if isinstance(failure, BadInputError):
        click.echo(f"{apply_style('Error:', 'bad')} {failure}", err=True)
        return EXIT_INPUT
    if failure is not None:
        raise failure
    return 0


def _deliver(
    session: Session,
    lines: Lines | Payload,
    items: Iterator[Outgoing],
    create: bool | None,
    done: Produced,
    *,
    quiet: bool,
) -> BaseException | None:
    """Send the messages, and count them in `done`. Return the error that stopped this, or None."""
    started = time.monotonic()
    failure: BaseException | None = None
    try:
        options: dict[str, Any] = {"create": create is not False, "traces": False}
        with Producer(settings=session.settings, **options) as producer:
            chunks = producer.send_chunks(done.topic, items)
            _send(session, lines, chunks, done, quiet=quiet)
    except BatchOutcomeUnknownError as error:
        done.unknown = error.unknown
        done.sent += sum(each is not None for each in error.ids)
        failure = error
    except BatchRejectedError as error:
        done.sent += sum(each is not None for each in error.ids)
        failure = error
    except RedisUnavailableError as error:
        failure = session.explain(error)
    except (StreamqdError, BadInputError, KeyboardInterrupt) as error:
        failure = error
    done.seconds = round(time.monotonic() - started, 3)
    return failure


def _send(
    session: Session,
    lines: Lines | Payload,
    chunks: Iterator[list[Uid]],
    done: Produced,
    *,
    quiet: bool,
) -> None:
    """Send the chunks in order, and show a progress bar on a terminal."""
    size = lines.size
    watched = sys.stderr.isatty() and size and not quiet and not session.quiet
    with contextlib.ExitStack() as stack:
        bar: Any = None
        if watched:
            bar = stack.enter_context(
                click.progressbar(length=size or 0, label=done.topic, file=sys.stderr)
            )
        position = 0
        for ids in chunks:
            if ids[0].is_duplicate:  # with --dedup-id, there is only one message
                done.duplicate = ids[0]
            else:
                done.sent += len(ids)
            if bar is not None:
                bar.update(lines.position - position)
                position = lines.position


def _items(
    lines: Lines | Payload,
    form: str,
    key: Key | None,
    shared: Outgoing,
    max_bytes: int,
    done: Produced,
    *,
    skip: bool,
) -> Iterator[Outgoing]:
    """Yield the messages to send, and count the lines in `done`.

    If `skip` is True, empty lines are skipped. Raises BadInputError at the first line that cannot
    be sent.
    """
    check = form == "jsonl" and not isinstance(key, _FieldKey)
    for line in lines.read(max_bytes):
        done.lines += 1
        if skip and (not line or (form == "jsonl" and not line.strip())):
            done.empty += 1
            continue
        try:
            if check:
                _parse_line(line)
            found = key(line) if key is not None else None
        except ValueError as error:
            raise BadInputError(f"{lines.place} {error}") from None
        if key is not None and found is None:
            done.without_key += 1
        yield shared._replace(value=line, key=found)


def _parse_line(line: bytes) -> Any:
    """Parse a line of JSON.

    Raises ValueError if this fails. The caller puts the place before its message, which therefore
    continues a sentence, as in `line 7 of FILE is not UTF-8 text`.
    """
    try:
        return _decode(line.decode())
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("is JSON that is nested too deeply") from None


def _not_json(word: str) -> Any:
    raise json.JSONDecodeError(f"{word} is not a JSON value", "", 0)


_decode = json.JSONDecoder(parse_constant=_not_json).decode
_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class _FieldKey:
    """Returns the key of a message, which is the value of one field of the JSON object."""

    def __init__(self, field: str) -> None:
        self._field = field

    def __call__(self, line: bytes) -> bytes | None:
        found = _parse_line(line)
        value = found.get(self._field) if isinstance(found, dict) else None
        if value is None:
            return None
        try:
            return encoded_key(value if isinstance(value, str) else _to_json(value))
        except ValueError as error:
            raise ValueError(f"has a {self._field} that is not a valid key: {error}") from None


def _source(payload: str | None, path: str | None, form: str) -> Lines | Payload:
    if payload is not None:
        return Payload(os.fsencode(payload))
    return (File if form == "file" else Lines)("-" if path is None else path)


def _message_template(
    headers: tuple[str, ...],
    partition: int | None,
    delay: float | None,
    at: float | None,
    expires: float | None,
    dedup_id: str | None,
) -> Outgoing:
    """Return a message with all fields except the value and the key. Raises click.UsageError."""
    shared = Outgoing(b"", None, _headers(headers), partition, delay, at, expires, dedup_id)
    try:
        to_envelope(shared, sys.maxsize)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    return shared


def _dedup_id(given: str | None, *, one: bool) -> str | None:
    if given is not None and not one:
        raise click.UsageError("--dedup-id allows only one message; pass PAYLOAD or --format file")
    if given == "":
        raise click.UsageError("--dedup-id must not be empty")
    return given


def _check_topic(session: Session, topic: str, create: bool | None) -> None:
    """Ask for confirmation before an unknown topic is created.

    If `create` is not None, do not ask, because the producer then creates or refuses the topic.
    Raises TopicNotFoundError if there is no terminal, and RequestRefusedError if the user declines.
    """
    settings = session.settings
    named = {*settings.topics, *(each.topic for each in settings.consumers)}
    if create is not None or topic in named:
        return
    with session.using_redis():
        if registry.partition_count(session.store, topic) is not None:
            return
        missing = f"topic {topic} does not exist"
        with contextlib.suppress(RedisResponseError):  # a user who may only send cannot list topics
            near = difflib.get_close_matches(topic, registry.read_registry(session.store)[0], n=1)
            missing += f" (did you mean {near[0]}?)" if near else ""
    if not sys.stdin.isatty():
        raise TopicNotFoundError(f"{missing}; not a terminal: pass --create to create {topic}")
    if not click.confirm(f"{missing}\nCreate topic {topic}?", err=True):
        raise RequestRefusedError("nothing was sent")


def _key(form: str, one: str | None, regex: str | None, field: str | None) -> Key | None:
    if sum(each is not None for each in (one, regex, field)) > 1:
        raise click.UsageError("--key, --key-regex and --key-field cannot be used together")
    if one is not None:
        try:
            fixed = encoded_key(os.fsencode(one))
        except ValueError as error:
            raise click.UsageError(f"--key: {error}") from None
        return lambda _line: fixed
    if field is not None:
        if form != "jsonl":
            raise click.UsageError("--key-field needs --format jsonl")
        return _FieldKey(field)
    if regex is None:
        return None
    try:
        pattern = re.compile(os.fsencode(regex))
    except re.error as error:
        raise click.UsageError(
            f"--key-regex {regex!r} is not a regular expression: {error}"
        ) from None
    group = 1 if pattern.groups else 0

    def key_of_match(line: bytes) -> bytes | None:
        found = pattern.search(line)
        return found[group] if found else None

    return key_of_match


def _headers(given: tuple[str, ...]) -> dict[str, str]:
    headers = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise click.UsageError(f"--header {text} is not NAME=VALUE")
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise click.UsageError(f"--header {name!a} is not UTF-8 text")
        headers[name] = value
    return headers


def _describe_failure(failure: BaseException | None) -> str | None:
    if failure is None:
        return None
    return "interrupted" if isinstance(failure, KeyboardInterrupt) else str(failure)


def _summarise(session: Session, done: Produced) -> None:
    # A rate that was measured for only a few milliseconds is meaningless.
    rate = f", {done.sent / done.seconds:,.0f}/s" if done.seconds >= RATE_SECONDS else ""
    took = f"in {done.seconds:.2f} s{rate}"
    if not session.quiet:
        click.echo(f"{count(done.sent, 'message')} sent to {done.topic} {took}")
    if done.unknown:
        click.echo(f"{count(done.unknown, 'message')} may or may not have been written", err=True)
    if done.without_key:
        session.note(f"{count(done.without_key, 'message')} without a key")
    if done.empty:
        session.note(f"{count(done.empty, 'empty line')} skipped")
