"""`streamqd check`: check all requirements of the daemon without starting it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import click

from streamqd import config, embedded, http, inspection, startup
from streamqd.admin import permissions, published
from streamqd.admin.diagnosis import host
from streamqd.admin.reading import server_unix_ms
from streamqd.cli.command import CommandResult, answering
from streamqd.cli.output import LEVELS, apply_style
from streamqd.cli.session import Session, is_timeout
from streamqd.errors import (
    ConfigError,
    InvalidValueError,
    RedisResponseError,
    RedisUnavailableError,
)
from streamqd.store import key_types, members, topics
from streamqd.words import count

PATIENCE = 2.0  # maximum number of seconds to wait for a server that is loading its data
HEARTBEAT_SECONDS_MAX = 15.0  # maximum number of seconds to wait for a duplicate's heartbeat
EXIT_PROBLEMS = 1


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """One line of the report. `level` is ok, warning, problem or skipped."""

    about: str
    level: str
    text: str


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All findings of `check`. `ok` is False if a finding is a problem."""

    ok: bool
    config: str
    findings: list[CheckFinding]


@click.command(short_help="Check that the daemon can start and work.")
@answering
def check(session: Session) -> CommandResult:
    """Check that the daemon can start and handle messages.

    The command checks the configuration, the handlers, Redis, the permissions and the HTTP address,
    without starting the daemon. The exit code is 1 if the daemon could not start or could not
    handle messages.
    """
    findings = [CheckFinding("config", "ok", _source(session))]
    prepared = startup.prepare(session.settings, slow=session.note)
    settings = prepared.settings
    findings += [CheckFinding("config", "warning", text) for text in config.warnings(settings)]
    findings += [_problem("handlers", text) for text in prepared.problems]
    if not prepared.problems:
        names = ", ".join(each.name for each in settings.consumers)
        findings.append(
            CheckFinding("handlers", "ok", f"{count(len(settings.consumers), 'consumer')}: {names}")
        )
    findings += _state_dir(settings.daemon.state_dir)
    findings += _http(settings)
    findings += _redis(session, settings)
    report = CheckReport(
        ok=not any(each.level == "problem" for each in findings),
        config=settings.source,
        findings=findings,
    )
    return CommandResult(report, lambda: _show(findings), 0 if report.ok else EXIT_PROBLEMS)


def _show(findings: list[CheckFinding]) -> None:
    for each in findings:
        level = apply_style(f"{each.level:<8}", LEVELS.get(each.level, ""))
        click.echo(f"{level} {each.about}: {each.text}")
    problems = sum(each.level == "problem" for each in findings)
    warnings = sum(each.level == "warning" for each in findings)
    click.echo(f"{count(problems, 'problem')}, {count(warnings, 'warning')}")


def _source(session: Session) -> str:
    if session.config_path is None:
        return "no file, so the defaults apply; pass --config FILE to check a file"
    return f"{session.settings.source} is readable"


def _state_dir(folder: Path) -> list[CheckFinding]:
    problem = host.access_problem(folder)
    return [_problem("daemon.state_dir", f"{folder}: {problem}")] if problem else []


def _http(settings: config.Settings) -> list[CheckFinding]:
    address = settings.http.address
    if address is None or startup.is_running(settings):
        return []  # HTTP is disabled, or the running daemon itself uses the address
    if isinstance(address, Path):
        address = settings.base_dir / address
    fault = http.find_fault(address)
    if fault is None:
        return []
    text = f"{fault}; stop the process that uses the address, or set another http.bind"
    return [_problem("http.bind", f"{text}, or the daemon serves no metrics and no health checks")]


def _redis(session: Session, settings: config.Settings) -> list[CheckFinding]:
    findings = []
    try:
        link = session.link
        link.open()  # fails immediately; PATIENCE is only for a server that is loading its data
        servers = inspection.ask_servers(link, PATIENCE)
        findings += [
            CheckFinding("redis", "ok", f"{facts.product} {facts.version} at {facts.address}")
            for facts in servers
        ]
        problems, warnings = inspection.check_servers(servers, settings)
        findings += [_problem("redis", text) for text in problems]
        findings += [
            CheckFinding("redis", "warning", text.removeprefix("redis: ")) for text in warnings
        ]
        findings += _topics(session, settings)
        findings += _permissions(session, settings)
        findings += _pipelines(session, settings)
        findings += _duplicate(session, settings)
    except RedisUnavailableError as error:
        away = session.embedded and not error.sent and not is_timeout(error)
        if away and not session.explain_forbidden(error):
            findings.append(_check_embedded())
        else:
            findings.append(_problem("redis", str(session.explain(error))))
    except RedisResponseError as error:
        findings.append(_problem("redis", str(error)))
    return findings


def _check_embedded() -> CheckFinding:
    try:
        program = embedded.find_server()
    except ConfigError as error:
        return _problem("redis", str(error))
    return CheckFinding(
        "redis", "skipped", f"the daemon is not running, and will start its own server, {program}"
    )


def _topics(session: Session, settings: config.Settings) -> list[CheckFinding]:
    findings = []
    for name, wanted in settings.topics.items():
        if "partitions" not in wanted.explicit:
            continue
        try:
            found = topics.partition_count(session.store, name)
        except InvalidValueError as error:
            findings.append(_problem("topics", f"{error}; {_DUPLICATE_FIX}"))
            continue
        text = f"topics.{name}.partitions is {wanted.partitions}, but the topic has {found}"
        if found is not None and wanted.partitions < found:
            findings.append(_problem("topics", f"{text} and cannot shrink; set {found}"))
        elif found is not None and wanted.partitions > found:
            findings.append(
                CheckFinding("topics", "warning", f"{text}; {_grow_hint(name, wanted.partitions)}")
            )
    return findings


def _grow_hint(name: str, partitions: int) -> str:
    return f"run `streamqd topic grow {name} {partitions}` to add partitions"


def _pipelines(session: Session, settings: config.Settings) -> list[CheckFinding]:
    if not config.find_useless(settings, ()):
        return []
    known, unread = topics.read_registry(session.store)
    if unread:
        return []  # a topic that seems to be missing may be one of the unreadable ones
    return [
        CheckFinding(f"pipelines.{name}", "warning", text)
        for name, text in config.find_useless(settings, known)
    ]


def _duplicate(session: Session, settings: config.Settings) -> list[CheckFinding]:
    """Report another process that uses the name of this instance and may still send heartbeats."""
    daemon = settings.daemon
    wrong = key_types.find_mistyped(
        session.link, members.expected_types(session.store.keys, daemon.fleet)
    )
    if wrong:
        return [_problem("redis", f"{each}; {key_types.remedy(each.key)}") for each in wrong]
    found = members.member(session.store, daemon.fleet, daemon.instance)
    if found is None:
        return []
    info, ttl = found.info, published.read_number(found.info.get("ttl")) or daemon.lease_ttl
    age = (server_unix_ms(session.link) - found.heartbeat_unix_ms) / 1000
    if age > ttl or info.get("lock") == startup.lock_identity(settings):
        return []
    process = members.process_fields(found)
    where = f"on {process.get('other_host', 'another host')} (pid {process.get('other_pid', '?')})"
    if not info.get("leaving") and _heartbeats(session, settings, found, ttl):
        text = f"{daemon.instance} is in use by a live instance {where}"
        return [_problem("daemon.instance", f"{text}; {_OTHER_NAME}")]
    text = f"{daemon.instance} was used {where} until {age:.1f} s ago"
    return [
        CheckFinding(
            "daemon.instance",
            "warning",
            f"{text}. If that instance still runs, {_OTHER_NAME}. Otherwise, the daemon starts"
            f" work {ttl:g} s after the last heartbeat",
        )
    ]


_DUPLICATE_FIX = "run `streamqd doctor --only values` for the fix"
_OTHER_NAME = "set another daemon.instance and daemon.state_dir, or stop it"


def _heartbeats(
    session: Session, settings: config.Settings, found: members.Heartbeat, ttl: float
) -> bool:
    """Wait for the next heartbeat of the other process. Return True if it arrived."""
    seconds = min(ttl / 5 * 1.25 + 0.5, HEARTBEAT_SECONDS_MAX)
    session.note(f"waiting up to {seconds:.1f} s for a heartbeat of {found.instance}")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.1)
        now = members.member(session.store, settings.daemon.fleet, found.instance)
        if now is None:
            return False
        if now.heartbeat_unix_ms != found.heartbeat_unix_ms:
            return True
    return False


def _permissions(session: Session, settings: config.Settings) -> list[CheckFinding]:
    lacking = permissions.find_missing(session.store, settings.daemon.fleet)
    if not lacking:
        return [CheckFinding("permissions", "ok", "the Redis user may run all required commands")]
    return [
        _problem("permissions", f"the Redis user may not run {command}{_format_keys(keys)}")
        for command, keys in permissions.by_command(lacking).items()
    ]


def _format_keys(keys: list[str]) -> str:
    shown = ", ".join(keys[:2])
    more = f" and {len(keys) - 2} more" if len(keys) > 2 else ""
    return f" on {shown}{more}" if shown else ""


def _problem(about: str, text: str) -> CheckFinding:
    return CheckFinding(about, "problem", text.removeprefix(f"{about}: "))
