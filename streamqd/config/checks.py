"""Check how settings relate to each other, and the files that they name."""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from collections.abc import Collection, Mapping
from pathlib import Path

from streamqd.config.archive_store import ArchiveStore, names_secrets, options_fault
from streamqd.config.consumers import GROUP, Consumer
from streamqd.config.endpoint import url_fault
from streamqd.config.exposure import check_exposure, exposure_warnings
from streamqd.config.outboxes import OutboxSettings, check_names, check_outbox, inline_password
from streamqd.config.pipelines import Pipeline
from streamqd.config.problems import Path as TomlPath
from streamqd.config.problems import Problems, quote
from streamqd.config.schedules import check_schedules
from streamqd.config.schema import Console, Daemon, Http, KeyPrefixes, Redis, Settings
from streamqd.config.secrets import has_password, is_credential
from streamqd.config.setting import NAME
from streamqd.config.topics import Retention
from streamqd.config.topology import EMBEDDED, SOCKET_BYTES_MAX
from streamqd.config.values import format_duration
from streamqd.model import BLOCK, HOLD_KEY, KEEPERS, Backoff

_SENTINEL_SETTINGS = ("sentinel_username", "sentinel_password_file")


# The minimum of `max_age` in seconds. It limits how often a worker is replaced, because each new
# worker costs a fork and its imports.
AGE_MIN = 1.0


def check(settings: Settings, problems: Problems, environ: Mapping[str, str]) -> None:
    """Add the problems that are found in the settings as a whole."""
    _check_redis(settings.redis, settings.source, problems, environ)
    _check_daemon(settings.daemon, problems)
    _check_http(settings.http, problems, environ)
    _check_console(settings.console, problems)
    check_exposure(settings, problems, environ)
    _check_keys(settings.keys, problems)
    _check_archive(settings.archive, settings.source, problems)
    for name, topic in settings.topics.items():
        _check_retention(topic.retention, ("topics", name, "retention"), problems)
    for name, pipeline in settings.pipelines.items():
        _check_pipeline(pipeline, ("pipelines", name), problems)
    check_consumers(settings, problems)
    paths: list[TomlPath] = [("schedules", at) for at in range(len(settings.schedules))]
    check_schedules(settings.schedules, paths, problems)
    for at, outbox in enumerate(settings.outboxes):
        _check_outbox_files(outbox, ("outboxes", at), settings.source, problems, environ)
    check_names(settings.outboxes, problems, environ)


def _check_archive(archive: ArchiveStore, source: str, problems: Problems) -> None:
    path = ("archive", "options")
    if not problems.ok(path):
        return
    if fault := options_fault(archive.options):
        problems.add(path, fault)
    elif names_secrets(archive.options):
        _check_inline_password(path, source, problems, "the environment")


def _check_pipeline(pipeline: Pipeline, path: TomlPath, problems: Problems) -> None:
    event_time = (*path, "event_time")
    timed = [each.split(maxsplit=1)[0] for each in pipeline.times]
    if twice := [each for each in timed if timed.count(each) > 1]:
        problems.add((*path, "times"), f"names {quote(twice[0])} twice; remove one of them")
    if pipeline.times and not pipeline.schema and problems.ok((*path, "schema"), (*path, "times")):
        problems.add(
            (*path, "times"),
            "needs a schema, and none is set; set schema, or remove times",
        )
    if pipeline.event_time and not pipeline.schema and problems.ok((*path, "schema"), event_time):
        problems.add(
            event_time,
            "needs a schema, but schema is not set",
        )
    elif pipeline.event_time and problems.ok((*path, "schema"), event_time):
        # Only Spark can parse a schema, so this pattern accepts every way to write such a column.
        schema = re.sub(r"/\*.*?\*/", " ", pipeline.schema or "")
        column = rf"(?<!\w){re.escape(pipeline.event_time)}(?:`|[\s:])[\s:]*(?i:date|timestamp)"
        if not re.search(column, schema):
            problems.add(
                event_time,
                f"{quote(pipeline.event_time)} is not a timestamp or date column of schema; name"
                " such a column, or remove event_time to use the time of the entry",
            )


def _check_redis(redis: Redis, source: str, problems: Problems, environ: Mapping[str, str]) -> None:
    url = ("redis", "url")
    if problems.ok(url):
        fault = url_fault(redis.url)
        if fault:
            problems.add(url, fault)
        elif has_password(redis.url):
            if redis.password_file is not None:
                problems.add(url, "contains a password, but password_file is also set")
            _check_inline_password(url, source, problems)
    names = ("username", "password_file", "ca_file", "cert_file", "key_file", *_SENTINEL_SETTINGS)
    stated = [name for name in names if getattr(redis, name) is not None]
    for name in stated:
        path = ("redis", name)
        if redis.url == EMBEDDED:
            problems.add(
                path,
                'cannot be used with redis.url = "embedded:"; remove it, or set'
                " redis.url to the address of a server",
            )
        elif name.endswith("_file") and problems.ok(path):
            _check_file(getattr(redis, name), path, problems, environ)
        if name in names[2:5] and problems.ok(url, path) and not redis.url.startswith("rediss"):
            problems.add(path, "requires TLS; write rediss:// in redis.url, or remove this setting")
        if name in _SENTINEL_SETTINGS and problems.ok(url, path) and "+sentinel:" not in redis.url:
            problems.add(path, "applies only to redis+sentinel://")
    if (redis.cert_file is None) != (redis.key_file is None):
        present, missing = (
            ("cert_file", "key_file") if redis.cert_file else ("key_file", "cert_file")
        )
        problems.add(("redis", present), f"also requires redis.{missing}")


def _check_outbox_files(
    outbox: OutboxSettings,
    path: TomlPath,
    source: str,
    problems: Problems,
    environ: Mapping[str, str],
) -> None:
    check_outbox(outbox, path, problems, environ)
    if problems.ok((*path, "database")) and inline_password(outbox):
        _check_inline_password((*path, "database"), source, problems)
    file = outbox.password_file
    # Skip a file that this user cannot read, because the user of a producer may not be allowed to
    # read the password.
    if file is not None and os.access(file, os.R_OK) and problems.ok((*path, "password_file")):
        _check_file(file, (*path, "password_file"), problems, environ)


def _check_inline_password(
    path: TomlPath, source: str, problems: Problems, instead: str = "password_file"
) -> None:
    """Add a problem if other users can read the password in the file or on the command line."""
    origin = problems.origins.get(path)
    if origin == "command line":
        problems.add(path, f"other users can see a password on the command line; use {instead}")
    elif origin is None and (mode := _mode(Path(source))) is not None and mode & 0o077:
        problems.add(
            path,
            f"contains a password, but other users may read {source} (mode {mode:04o}); use"
            f" {instead}, or run chmod 600 {source}",
        )


def _check_file(file: Path, path: TomlPath, problems: Problems, environ: Mapping[str, str]) -> None:
    try:
        with file.open("rb") as opened:
            found = os.fstat(opened.fileno())
            empty = not opened.read(1)
    except OSError as error:
        problems.add(path, f"{file} cannot be read ({error.strerror})")
        return
    if not stat.S_ISREG(found.st_mode):
        problems.add(path, f"{file} is not a regular file")
    elif empty:
        problems.add(path, f"{file} is empty")
    elif str(path[-1]).endswith(("password_file", "token_file")):
        if not is_credential(file, environ):
            _check_private(file, found, path, problems)
    elif path[-1] == "key_file" and found.st_mode & stat.S_IROTH:
        problems.add(path, f"all users may read {file} (chmod o-r)")


def _check_private(file: Path, found: os.stat_result, path: TomlPath, problems: Problems) -> None:
    if stat.S_IMODE(found.st_mode) & 0o077:
        problems.add(path, f"other users may read {file} (chmod 600)")
    elif os.geteuid() not in (0, found.st_uid) and found.st_uid != 0:
        problems.add(path, f"{file} does not belong to the daemon's user (chown)")


def _check_daemon(daemon: Daemon, problems: Problems) -> None:
    path = ("daemon", "instance")
    if problems.ok(path) and not NAME.fullmatch(daemon.instance):
        problems.add(
            path,
            f"the host name {quote(daemon.instance)} is not a valid instance name; set"
            " daemon.instance",
        )
    if daemon.instance in KEEPERS:
        problems.add(path, f"{daemon.instance} is reserved for commands")
    _check_backoff(daemon.crash_backoff, ("daemon", "crash_backoff"), problems)
    path = ("daemon", "state_dir")
    if problems.ok(path) and daemon.state_dir.exists() and not daemon.state_dir.is_dir():
        problems.add(path, f"{daemon.state_dir} is not a directory")


def _check_backoff(backoff: Backoff, path: TomlPath, problems: Problems) -> None:
    longest = (*path, "max")
    if problems.ok(longest, (*path, "base")) and backoff.max < backoff.base:
        problems.add(
            longest,
            f'"{format_duration(backoff.max)}" is shorter than base'
            f' ("{format_duration(backoff.base)}")',
        )


def _check_http(http: Http, problems: Problems, environ: Mapping[str, str]) -> None:
    if http.token_file is not None and problems.ok(("http", "token_file")):
        _check_file(http.token_file, ("http", "token_file"), problems, environ)
    path = ("http", "bind")
    if not http.bind or not problems.ok(path):
        return
    if http.bind.startswith("unix:"):
        name = http.bind.removeprefix("unix:")
        if not name or len(os.fsencode(name)) > SOCKET_BYTES_MAX:
            problems.add(
                path,
                f"{quote(http.bind)} is not a valid socket address; write unix: and a path of at"
                f" most {SOCKET_BYTES_MAX} bytes, relative to the directory of this file",
            )
        return
    if not _is_host_and_port(http.bind):
        problems.add(
            path,
            f'{quote(http.bind)} is not a valid address such as "HOST:PORT", "unix:PATH", or ""'
            " to disable HTTP",
        )


def _is_host_and_port(bind: str) -> bool:
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):([0-9]{1,5})", bind)
    return found is not None and int(found[2]) <= 65_535


def _check_console(console: Console, problems: Problems) -> None:
    path = ("console", "bind")
    if problems.ok(path) and not _is_host_and_port(console.bind):
        problems.add(path, f'{quote(console.bind)} is not a valid address such as "HOST:PORT"')
    header, peers = ("console", "proxy_header"), ("console", "proxy_from")
    if problems.ok(header, peers) and (console.proxy_header is None) != (not console.proxy_from):
        present, missing = ("proxy_header", "proxy_from")[:: 1 if console.proxy_header else -1]
        problems.add(("console", present), f"also requires console.{missing}")
    for peer in console.proxy_from if problems.ok(peers) else ():
        try:
            ipaddress.ip_network(peer)
        except ValueError as error:
            problems.add(peers, f"{quote(peer)} is not a valid address or network ({error})")


def _check_keys(keys: KeyPrefixes, problems: Problems) -> None:
    if not problems.ok(("keys", "control"), ("keys", "streams")):
        return
    control, streams = f"{keys.control}:", f"{keys.streams}:"
    if control.startswith(streams) or streams.startswith(control):
        problems.add(
            ("keys", "streams"),
            f"{quote(keys.streams)} and keys.control overlap: neither may start with the other",
        )


def _check_retention(retention: Retention, path: TomlPath, problems: Problems) -> None:
    # A drop limit removes the oldest entries even if a limit of the retention would keep them.
    for limit, bound in (("drop_unacked_after", "max_age"), ("drop_unacked_above", "max_length")):
        least, most = getattr(retention, bound), getattr(retention, limit)
        both = problems.ok((*path, limit), (*path, bound))
        if both and least is not None and most is not None and most < least:
            problems.add(
                (*path, limit),
                f"must be at least {bound}, which retains entries that would be dropped otherwise",
            )


def check_consumers(settings: Settings, problems: Problems) -> None:
    """Add the problems of each consumer, and a problem for each consumer that is declared twice."""
    first: dict[str, int] = {}
    for index, consumer in enumerate(settings.consumers):
        path = ("consumers", index)
        if not problems.ok(path) or not (consumer.topic and consumer.group):
            continue
        other = first.setdefault(consumer.name, index)
        if other != index:
            problems.add(
                path,
                f"consumers[{other}] ({settings.consumers[other].place}) already reads"
                f" {_describe_source(consumer)} as group {consumer.group}; choose another group, or"
                " remove one of the two",
            )
        check_consumer(consumer, path, problems)
        handler = (*path, "handler")
        declared = settings.daemon.handlers or not problems.ok(("daemon", "handlers"))
        if not consumer.handler and not declared and problems.ok(handler):
            problems.add(
                handler,
                'is missing; write handler = "module:function", or add the module that declares'
                " the handler to daemon.handlers",
            )


def _describe_source(consumer: Consumer) -> str:
    return (
        f"the dead letters of {consumer.topic}" if consumer.reads_dead_letters else consumer.topic
    )


def check_consumer(consumer: Consumer, path: TomlPath, problems: Problems) -> None:
    """Add a problem for each conflict between the settings of one consumer."""
    _check_backoff(consumer.backoff, (*path, "backoff"), problems)
    soft, hard = consumer.timeout, consumer.hard_timeout
    hard_path = (*path, "hard_timeout")
    if (
        soft is not None
        and hard is not None
        and hard <= soft
        and problems.ok((*path, "timeout"), hard_path)
    ):
        problems.add(
            hard_path,
            f'"{format_duration(hard)}" is not longer than timeout ("{format_duration(soft)}"),'
            " after which the handler needs time to finish",
        )
    if consumer.rate_burst is not None and not consumer.rate and problems.ok((*path, "rate")):
        problems.add((*path, "rate_burst"), "has no effect without rate; set rate, or remove it")
    if consumer.rate_per == GROUP and not consumer.rate and problems.ok((*path, "rate")):
        problems.add((*path, "rate_per"), "has no effect without rate; set rate, or remove it")
    if 0 < consumer.max_age < AGE_MIN and problems.ok((*path, "max_age")):
        problems.add(
            (*path, "max_age"),
            f'"{format_duration(consumer.max_age)}" is too small (minimum:'
            f' "{format_duration(AGE_MIN)}", or 0 for no limit)',
        )
    both = sorted(set(consumer.retry_on) & set(consumer.dead_on))
    if both:
        problems.add((*path, "dead_on"), f"{both[0]} must not be in both dead_on and retry_on")
    both = sorted(set(consumer.breaker.on) & set(consumer.dead_on))
    if both and consumer.breaker.failures:
        problems.add(
            (*path, "dead_on"),
            f"{both[0]} must not be in both dead_on and breaker.on, where it would never count",
        )
    _check_order(consumer, path, problems)


def _check_order(consumer: Consumer, path: TomlPath, problems: Problems) -> None:
    """Add a problem for each setting that conflicts with the order that `on_error` keeps."""
    on_error = (*path, "on_error")
    if consumer.on_error == BLOCK and consumer.lanes > 1:
        problems.add(
            on_error,
            '"block" handles one message at a time; remove concurrency, or use "hold-key" to keep'
            " the order of each key",
        )
    if consumer.on_error == HOLD_KEY and consumer.lanes > 1 and consumer.order != "key":
        problems.add(
            on_error,
            f'"hold-key" requires order = "key", not "{consumer.order}"',
        )
    if consumer.on_error == BLOCK and consumer.breaker.failures:
        problems.add(
            (*path, "breaker"),
            'has no effect with on_error = "block", because the first failure already stops the'
            " partition; remove breaker, and set max_attempts = 0 to wait until a dependency is"
            " up again",
        )


def warnings(settings: Settings) -> list[str]:
    """Return a warning for each setting that is valid but may have surprising effects.

    Each is one sentence that starts with a TOML path.
    """
    daemon, found = settings.daemon, []
    if settings.redis.connect_timeout > daemon.lease_ttl:
        found.append(
            "redis.connect_timeout: it is longer than daemon.lease_ttl, so leases can expire"
            " during one slow connection attempt"
        )
    for consumer in settings.consumers:
        if consumer.concurrency > 1 and consumer.order == "partition":
            found.append(
                f"concurrency: {consumer.name} handles one message at a time, because its order"
                ' is "partition"; with "key", messages of different keys run at the same time'
            )
        limit = consumer.hard_timeout or consumer.timeout
        if limit is not None and limit > daemon.drain_timeout:
            found.append(
                f"daemon.drain_timeout: a message of {consumer.name} may run for"
                f" {format_duration(limit)}, but a stop waits only"
                f" {format_duration(daemon.drain_timeout)}, and longer runs are repeated after"
                " the restart"
            )
        found += _breaker_warnings(consumer)
    return found + exposure_warnings(settings)


def find_useless(settings: Settings, registered: Collection[str]) -> list[tuple[str, str]]:
    """Return the pipelines whose topic is neither configured nor registered.

    Each item is the name of a pipeline and a sentence. This is only a warning, because the topic
    may be created later.
    """
    return [
        (
            name,
            f"topic {name} does not exist, so this section has no effect",
        )
        for name in settings.pipelines
        if name not in settings.topics and name not in registered
    ]


def _breaker_warnings(consumer: Consumer) -> list[str]:
    """Return a warning if a message that always fails can block its partition forever."""
    breaker, attempts = consumer.breaker, consumer.max_attempts
    # With a breaker, the first failure of a message does not count as an attempt, so the message is
    # dead-lettered only after max_attempts + 1 failures.
    early = 0 < breaker.failures <= attempts + 1 and attempts
    if not early or consumer.retry_max_age is not None:
        return []
    warning = (
        f"breaker.failures: a message of {consumer.name} that always fails can open the circuit"
        f" before it reaches max_attempts = {attempts}, and then block its partition; set"
        f" failures above {attempts + 1}, or set retry_max_age"
    )
    return [warning]


def _mode(file: Path) -> int | None:
    try:
        return stat.S_IMODE(file.stat().st_mode)
    except OSError:
        return None
