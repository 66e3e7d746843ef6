"""Checks of outboxes: no relay, rows that wait, dead-lettered rows, and the size of the tables.

The relays publish their figures in Redis. The databases are read only if the caller passes a
function that reads them, because this layer has no database drivers. Commands pass one, and the
console does not.
"""

from __future__ import annotations

from collections.abc import Iterator

from streamqd.admin import outboxes
from streamqd.admin.checks import CheckResult, Need, Severity, check
from streamqd.admin.diagnosis.facts import DiagnosisFacts, OutboxFacts, ReadTable
from streamqd.admin.reading import ViewReader
from streamqd.config import Settings
from streamqd.store.outbox import OutboxView
from streamqd.words import memory, plural, precise_duration

FAILING_SECONDS = 10.0  # time after which a blocked relay is reported
WAITING_SECONDS = 300.0  # age of the oldest row at which it is reported, as in the alert
DELETED_ROWS = 100_000  # dead tuples in PostgreSQL that are not vacuumed
UNUSED_BYTES = 256 << 20  # free bytes inside a file
UNREAD = "the tables of outboxes: run `streamqd doctor` on the host of a daemon"


def gather(
    reader: ViewReader,
    unseen: list[str],
    settings: Settings,
    read_table: ReadTable | None,
    *,
    wanted: bool,
) -> list[OutboxFacts]:
    """Read the outboxes if a check needs them, and the tables of those in the configuration."""
    if not wanted:
        return []
    configured = {each.name: each for each in settings.outboxes}
    if configured and read_table is None:
        unseen.append(UNREAD)
    return [
        OutboxFacts(
            view,
            configured=view.name in configured,
            table=read_table(configured[view.name])
            if read_table is not None and view.name in configured
            else None,
        )
        for view in outboxes.read(reader, configured)
    ]


def _measure_backlog(facts: DiagnosisFacts, each: OutboxFacts) -> tuple[int, float]:
    """Return the number of rows, and the age of the oldest one in seconds.

    Both come from the table if it was read, or else from the relay.
    """
    if each.table is not None and not each.table.problem:
        return each.table.rows, each.table.oldest_seconds
    return each.view.rows, each.view.oldest_age(facts.now_unix_ms)


def _rows_wait(rows: int, seconds: float) -> str:
    if not rows:
        return "new rows wait"
    verb = "waits" if rows == 1 else "wait"
    return f"{plural(rows, 'row')} {verb}, the oldest {precise_duration(seconds)}"


@check("outboxes.no-relay", Severity.PROBLEM, Need.OUTBOXES)
def _no_relay(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """No relay owns an outbox, so its rows are not sent."""
    names = {each.view.name for each in facts.outboxes if each.configured}
    for each in facts.outboxes:
        rows, seconds = _measure_backlog(facts, each)
        view = each.view
        if view.relayed or not (each.configured or rows):
            continue
        last = f"; its last relay reported: {view.error}" if view.error else ""
        yield CheckResult(
            f"no relay owns outbox {view.name}: {_rows_wait(rows, seconds)}{last}",
            outboxes.advice(view)
            if view.cause == "shared"
            else f"{outboxes.start(view, names)}; if one runs, look for outbox.exited in its log",
            about=view.name,
            evidence={"rows": rows, "oldest_seconds": round(seconds, 1), "error": view.error},
        )


@check("outboxes.failing", Severity.PROBLEM, Need.OUTBOXES)
def _failing(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The relay of an outbox has been blocked for 10 s, and sends no rows."""
    for each in facts.outboxes:
        view = each.view
        failing = outboxes.failing_seconds(view, facts.now_unix_ms)
        if not view.relayed or failing < FAILING_SECONDS:
            continue
        rows, seconds = _measure_backlog(facts, each)
        yield CheckResult(
            f"the relay of outbox {view.name} ({view.owner}) has been blocked for"
            f" {precise_duration(failing)}, and {_rows_wait(rows, seconds)}: {view.error}",
            outboxes.advice(view),
            about=view.name,
            evidence={"rows": rows, "oldest_seconds": round(seconds, 1), "error": view.error},
            severity=Severity.WARNING if view.cause == "backlog" else None,
        )


@check("outboxes.waiting", Severity.WARNING, Need.OUTBOXES)
def _late(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """A row of an outbox has waited for 5 minutes, although its relay reports no error."""
    for each in facts.outboxes:
        rows, seconds = _measure_backlog(facts, each)
        view = each.view
        if view.relayed and not view.error and rows and seconds >= WAITING_SECONDS:
            yield CheckResult(
                f"the relay of outbox {view.name} is late: {_rows_wait(rows, seconds)}",
                f"run `streamqd outbox status {view.name}` to see whether the number of rows falls."
                " If it does not, rows are committed faster than the relay sends them: raise"
                " `batch`, or use several outboxes",
                about=view.name,
                evidence={"rows": rows, "oldest_seconds": round(seconds, 1), "relay": view.owner},
            )


@check("outboxes.dead-rows", Severity.WARNING, Need.OUTBOXES)
def _dead(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """An outbox has rows that could not be sent."""
    for each in facts.outboxes:
        view, table = each.view, each.table
        dead, last, since = view.dead, "", " since its relay started"
        if table is not None and not table.problem:
            dead, last, since = table.dead, f"; the newest: {table.dead_error}", ""
        if dead:
            yield CheckResult(
                f"{plural(dead, 'row')} of outbox {view.name} could not be sent{since}{last}",
                f"run `streamqd outbox status {view.name}` to see the errors. Correct the cause,"
                " then move the rows back or delete them (see *Send dead-lettered rows again* in"
                " the documentation)",
                about=view.name,
                evidence={"dead": dead},
            )


@check("outboxes.database", Severity.PROBLEM, Need.OUTBOXES)
def _database(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The tables of an outbox cannot be read from this host."""
    for each in facts.outboxes:
        view, table = each.view, each.table
        if table is None or not table.problem:
            continue
        if view.relayed and view.error == table.problem:
            continue  # `outboxes.failing` reports it
        works = view.relayed and not view.error
        yield CheckResult(
            f"the tables of outbox {view.name} cannot be read from this host: {table.problem}"
            + ("; its relay can read them" if works else ""),
            "run `streamqd doctor --only outboxes` on the host of the relay, as its user"
            if works
            else f"correct the cause, then run `streamqd outbox check {view.name}`",
            about=view.name,
            evidence={"relay": view.owner},
            severity=Severity.NOTE if works else None,
        )


@check("outboxes.bloat", Severity.WARNING, Need.OUTBOXES)
def _bloat(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """The table of an outbox keeps the space of many deleted rows."""
    for each in facts.outboxes:
        table, name = each.table, each.view.name
        if table is None or table.problem:
            continue
        deleted, unused, size = table.deleted_rows or 0, table.unused_bytes or 0, table.total_bytes
        evidence = {"deleted_rows": deleted, "unused_bytes": unused, "total_bytes": size}
        if deleted >= DELETED_ROWS and deleted > table.rows:
            yield CheckResult(
                f"table {table.name} of outbox {name} has {deleted:,} deleted rows that are not"
                f" vacuumed ({memory(size)} in all), and each read of the relay scans them",
                f"run `VACUUM {table.name}`. If the number does not fall, end the transaction with"
                " the oldest xact_start in pg_stat_activity",
                about=name,
                evidence=evidence,
            )
        elif unused >= UNUSED_BYTES and 2 * unused > size:
            yield CheckResult(
                f"the file with table {table.name} of outbox {name} uses {memory(size)}, but"
                f" {memory(unused)} of it is empty. New rows will use this space",
                "run `VACUUM` at a time when the application can wait"
                if table.dialect == "sqlite"
                else f"run `OPTIMIZE TABLE {table.name}` at a time when the application can wait",
                about=name,
                evidence=evidence,
                severity=Severity.NOTE,
            )


@check("outboxes.shared-table", Severity.PROBLEM, Need.OUTBOXES)
def _shared(facts: DiagnosisFacts) -> Iterator[CheckResult]:
    """Two outboxes use the same table, so the relay that started later is blocked."""
    views: list[OutboxView] = [each.view for each in facts.outboxes]
    for some in outboxes.find_shared_tables(views):
        names = " and ".join(each.name for each in some)
        yield CheckResult(
            f"the outboxes {names} use the same table; the relay that started later is blocked",
            "remove all but one of them. `streamqd config show` on each host lists them",
            about=some[0].name,
            evidence={"relays": [each.owner for each in some]},
        )
