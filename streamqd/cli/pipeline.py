"""`streamqd pipeline`: commands that use Spark, which is imported only when one of them runs."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from streamqd.cli import answers
from streamqd.cli import shell as shells
from streamqd.cli.arguments import (
    DIRECTORY,
    DURATION,
    FOLDER,
    MOMENT,
    RATE,
    SIZE,
    Command,
    json_option,
    unix_ms,
)
from streamqd.cli.command import CommandResult, answering, connected
from streamqd.cli.engine import bar
from streamqd.cli.engine import engine as lend_engine
from streamqd.cli.output import emit, printable, table
from streamqd.cli.session import Session
from streamqd.errors import RedisResponseError, RedisUnavailableError
from streamqd.words import count

if TYPE_CHECKING:
    from streamqd.spark.pipelines.compact import Compacted
    from streamqd.spark.pipelines.standing import StandingQuery
    from streamqd.spark.pipelines.storage import Archive

TOPICS = click.option(
    "-t", "--topic", "topics", metavar="TOPIC", multiple=True,
    help="Select only this topic. May be repeated. Default: all topics.",
)  # fmt: skip
ARCHIVE = click.option(
    "-a", "--archive", "folder", type=DIRECTORY, required=True,
    help="The directory of the archive: a path that all Spark processes share, or an s3://, gs://"
    " or abfss:// URL.",
)  # fmt: skip
MAYBE_ARCHIVE = click.option(
    "-a", "--archive", "folder", type=DIRECTORY,
    help="The directory or URL of the archive. Default: read only Redis.",
)  # fmt: skip
_ARCHIVED = (
    *("topic", "rows", "size", "files", "missing", "parsed", "quarantined", "dead_letters"),
    "seconds",
)
SINCE = click.option(
    "--since", type=MOMENT, metavar="TIME",
    help="Select only entries since this time, such as 12h (12 hours ago) or 2026-11-21T08:30"
    " (UTC).",
)  # fmt: skip
UNTIL = click.option(
    "--until", type=MOMENT, metavar="TIME", help="Select only entries before this time."
)


def _open_archive(
    session: Session, folder: Path | str | None, *, create: bool = False
) -> Archive | None:
    """Open the archive in a directory. Return None if no directory was passed.

    Raises RequestRefusedError.
    """
    from streamqd.spark.pipelines.storage import Archive

    stored = session.settings.archive.pairs
    return None if folder is None else Archive(folder, create=create, options=stored)


def spark_options(command: Command) -> Command:
    """Add `--master` and `--conf`."""
    for option in (
        click.option(
            "--conf", metavar="NAME=VALUE", multiple=True, help="A Spark setting. May be repeated."
        ),
        click.option(
            "--master", metavar="URL",
            help="The Spark master, such as spark://host:7077. Default: local[*].",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


@click.group()
def pipeline() -> None:
    """Archive, query, replay and report on topics with Spark.

    The commands require the spark extra (pip install '.[spark]' in a clone of streamqd) and Java
    17 or newer.
    """


@pipeline.command()
@TOPICS
@ARCHIVE
@click.option(
    "--every", type=DURATION, help="Repeat the run after this time. Default: run only once."
)
@click.option(
    "--batch-rows", type=click.IntRange(1, 10_000_000), default=4_000_000, show_default=True,
    help="The maximum number of entries per batch.",
)  # fmt: skip
@click.option(
    "--allow-loss",
    is_flag=True,
    help="Continue even if entries were trimmed before they were archived.",
)
@spark_options
@json_option
@connected
def archive(
    session: Session,
    *,
    topics: tuple[str, ...],
    folder: Path | str,
    every: float | None,
    batch_rows: int,
    allow_loss: bool,
    master: str | None,
    conf: tuple[str, ...],
    as_json: bool,
) -> None:
    """Archive topics as Delta tables, each entry exactly once.

    You can kill the command and run it again at any time. If a topic has archive = "required", no
    entry is trimmed before it is archived.
    """
    from streamqd.spark.pipelines.archive import Archiver

    def warn(text: str) -> None:
        click.echo(f"Warning: {printable(text, lines=True)}", err=True)

    with lend_engine(session, "archive", master, conf) as engine:
        parses = any(each.schema for each in session.settings.pipelines.values())
        archiver = Archiver(
            session.settings, folder, engine if parses else engine.light, bar(session),
            warn=warn, batch_rows=batch_rows, allow_loss=allow_loss,
        )  # fmt: skip
        with contextlib.closing(archiver):
            ran = False
            while True:
                try:
                    done = archiver.run(topics)
                except (RedisUnavailableError, RedisResponseError) as error:
                    # Before the first successful run, the address or the password may be wrong.
                    # Later, an error means an outage, which is worth waiting for.
                    if every is None or not ran:
                        raise
                    click.echo(f"Error: {printable(str(error), lines=True)}", err=True)
                    time.sleep(every)
                    continue
                ran = True
                document = {
                    "archive": str(folder),
                    "rows": sum(each.rows for each in done),
                    "history_rows": archiver.history_rows,
                    "start_seconds": engine.start_seconds,
                    "topics": [dataclasses.asdict(each) for each in done],
                }
                _show_archived(document, as_json)
                problems = list(archiver.problems.values())
                for each in problems if every is not None else problems[1:]:
                    click.echo(f"Error: {printable(str(each), lines=True)}", err=True)
                if every is not None:
                    time.sleep(every)
                elif problems:
                    raise problems[0]
                else:
                    return


def _show_archived(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit(document)
        return
    table(
        (
            *("TOPIC", "ROWS", "BYTES", "FILES", "MISSING", "PARSED", "QUARANTINED"),
            *("DEAD_LETTERS", "SECONDS"),
        ),
        [tuple(each[name] for name in _ARCHIVED) for each in document["topics"]],
    )
    click.echo(f"{count(document['rows'], 'row')} archived in {document['archive']}")


@pipeline.command()
@TOPICS
@ARCHIVE
@click.option(
    "--target", type=SIZE, default="256MiB", show_default=True,
    help="The target size of the merged files.",
)  # fmt: skip
@click.option(
    "--grace", type=DURATION, default="1h", show_default=True,
    help="The time for which replaced files are kept for running readers, in full hours and at"
    " least 1h.",
)  # fmt: skip
@answering
def compact(
    session: Session,
    *,
    topics: tuple[str, ...],
    folder: Path | str,
    target: int,
    grace: float,
) -> CommandResult:
    """Merge the small files of an archive now.

    This does not need Spark. `pipeline archive` merges files automatically when enough files of
    similar size have accumulated.
    """
    from streamqd.spark.pipelines.compact import compact as run

    done, problems = run(session.settings, folder, topics, target=target, grace=grace)
    document = {
        "archive": str(folder),
        "topics": [dataclasses.asdict(each) for each in done],
        "problems": [str(each) for each in problems],
    }
    notes = [f"Error: {printable(str(each), lines=True)}" for each in problems[1:]]
    first = problems[0] if problems else None
    return CommandResult(document, lambda: _show_compacted(done), notes=notes, error=first)


@pipeline.command()
@click.argument("topic")
@ARCHIVE
@click.option(
    "--quarantine-only", is_flag=True,
    help="Parse only the entries in the quarantine. Entries that now fit the schema move to the"
    " parsed table.",
)  # fmt: skip
@click.option(
    "--allow-loss", is_flag=True,
    help="Also remove parsed rows whose archived entries were deleted.",
)  # fmt: skip
@spark_options
@answering
def reparse(
    session: Session,
    *,
    topic: str,
    folder: Path | str,
    quarantine_only: bool,
    allow_loss: bool,
    master: str | None,
    conf: tuple[str, ...],
) -> CommandResult:
    """Parse archived entries again with the topic's current schema.

    Without --quarantine-only, the command writes the parsed table and the quarantine again, and the
    types of columns can change. The first commit removes all old rows, and later commits add the
    new ones. Readers therefore see incomplete tables while the command runs. If the command is
    killed, run it again.
    """
    from streamqd.spark.pipelines.reparse import reparse as run_again

    with lend_engine(session, "reparse", master, conf) as engine:
        done = run_again(
            session.settings, folder, topic, engine,
            quarantine_only=quarantine_only, allow_loss=allow_loss,
        )  # fmt: skip
    text = f"{count(done.parsed, 'row')} of {topic} parsed, {done.quarantined:,} quarantined"
    return CommandResult(dataclasses.asdict(done), text)


def _show_compacted(done: Iterable[Compacted]) -> None:
    table(
        ("TOPIC", "ROWS", "FILES", "BEFORE", "PURGED", "SECONDS"),
        [
            (each.topic, each.rows, each.files_after, each.files_before, each.purged, each.seconds)
            for each in done
        ],
    )


@pipeline.command()
@click.argument("topic")
@MAYBE_ARCHIVE
@click.option(
    "--from", "tier", type=click.Choice(["all", "hot", "cold", "dlq"]), default="all",
    show_default=True,
    help="The source of the messages. all: the archive and Redis. hot: only Redis. cold: only the"
    " archive. dlq: dead letters.",
)  # fmt: skip
@click.option(
    "--to-topic",
    "target",
    metavar="TOPIC",
    default="",
    help="Send to this topic. Default: the same topic.",
)
@SINCE
@UNTIL
@click.option(
    "-k",
    "--key",
    "keys",
    multiple=True,
    help="Select only messages with this key. May be repeated.",
)
@click.option(
    "-H", "--header", "headers", metavar="NAME=VALUE", multiple=True,
    help="Select only messages with this header. If repeated, a message must have all of the"
    " headers.",
)  # fmt: skip
@click.option(
    "--where",
    metavar="SQL",
    default="",
    help="Select only messages for which this SQL condition is true.",
)
@click.option("--rate", type=RATE, metavar="N/s", help="The maximum rate, such as 50/s.")
@click.option(
    "--name", default="",
    help="The name of this replay. Replays with the same name do not send a message twice within 30"
    " days.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Count the messages, but send nothing.")
@spark_options
@answering
def replay(
    session: Session,
    *,
    topic: str,
    folder: Path | str | None,
    tier: str,
    target: str,
    since: tuple[float, bool] | None,
    until: tuple[float, bool] | None,
    keys: tuple[str, ...],
    headers: tuple[str, ...],
    where: str,
    rate: float | None,
    name: str,
    dry_run: bool,
    master: str | None,
    conf: tuple[str, ...],
) -> CommandResult:
    """Send messages of a topic again.

    The x-replay-of header of each message contains the ID of the original entry.
    """
    from streamqd.spark.pipelines import replay as replays

    choice = replays.ReplayFilter(
        since=_to_utc(since),
        until=_to_utc(until),
        keys=keys,
        headers=dict(_parse_pair("--header", each) for each in headers),
        where=where,
        tier=tier,
    )
    with lend_engine(session, "replay", master, conf) as engine:
        archive = _open_archive(session, folder)
        done = replays.replay(
            session.settings, engine(), topic, choice,
            archive=archive, target=target, rate=rate, name=name, dry_run=dry_run,
        )  # fmt: skip
    if dry_run:
        text = f"{count(done.rows, 'message')} of {topic} would be sent to {done.target}"
    elif done.rows and not done.sent:
        text = f"nothing left to do: {count(done.rows, 'message')} sent under this name before"
    else:
        text = f"{count(done.sent, 'message')} of {topic} sent to {done.target}"
    return CommandResult(dataclasses.asdict(done), text)


@pipeline.command()
@click.argument("job", metavar="MODULE:FUNCTION")
@MAYBE_ARCHIVE
@click.option(
    "--checkpoints", type=FOLDER, required=True,
    help="The directory for the checkpoints of the job's queries.",
)  # fmt: skip
@click.option(
    "--set", "arguments", metavar="NAME=VALUE", multiple=True,
    help="An argument of the job. May be repeated.",
)  # fmt: skip
@spark_options
@answering
def run(
    session: Session,
    *,
    job: str,
    folder: Path | str | None,
    checkpoints: Path,
    arguments: tuple[str, ...],
    master: str | None,
    conf: tuple[str, ...],
) -> CommandResult:
    """Run your own function on Spark.

    The function receives a streamqd.spark.pipelines.run.Job with the Spark session, the topics
    and their sink. With --json, the command prints the function's result.
    """
    with lend_engine(session, job, master, conf) as engine:
        from streamqd.spark.pipelines import run as jobs
        from streamqd.spark.pipelines.checkpoints import lease_checkpoints

        function = jobs.load(job, session.settings.base_dir)
        with lease_checkpoints(session.settings, checkpoints):
            made = jobs.Job(
                engine(),
                session.settings,
                checkpoints.absolute(),
                _open_archive(session, folder),
                dict(_parse_pair("--set", each) for each in arguments),
            )
            returned = jobs.run(made, function)
    return CommandResult(returned, lambda: None)


def _parse_pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise click.UsageError(f"{option} {text} is not NAME=VALUE")
    return name, value


def _to_utc(moment: tuple[float, bool] | None) -> dt.datetime | None:
    if moment is None:
        return None
    return dt.datetime.fromtimestamp(unix_ms(moment, round(time.time() * 1000)) / 1000, dt.UTC)


@pipeline.command()
@TOPICS
@MAYBE_ARCHIVE
@click.option(
    "-o", "--out", type=DIRECTORY, required=True,
    help="The directory or URL of the report. An earlier report there is compared with the new one,"
    " and then replaced.",
)  # fmt: skip
@SINCE
@UNTIL
@click.option(
    "--schema", "schemas", metavar="TOPIC=COLUMNS", multiple=True,
    help="The types of a topic's JSON fields, such as 'orders=id long, at timestamp'. May be"
    " repeated.",
)  # fmt: skip
@click.option("--overwrite", is_flag=True, hidden=True, help="No longer needed.")
@spark_options
@answering
def report(
    session: Session,
    *,
    topics: tuple[str, ...],
    folder: Path | str | None,
    out: Path | str,
    since: tuple[float, bool] | None,
    until: tuple[float, bool] | None,
    schemas: tuple[str, ...],
    overwrite: bool,  # noqa: ARG001
    master: str | None,
    conf: tuple[str, ...],
) -> CommandResult:
    """Write an HTML report on topics.

    The report shows the problems of the topics, the most severe first, and the contents of the
    topics. The command writes two files: report.html is a self-contained page, and report.json
    contains the numbers.
    """
    from streamqd.spark import need_spark

    with lend_engine(session, "report", master, conf) as engine:
        need_spark("jinja2")
        from streamqd.spark.pipelines import report as reports
        from streamqd.spark.pipelines.report_queries import ReportScope

        scope = ReportScope(
            topics=topics,
            archive=_open_archive(session, folder),
            since=_to_utc(since),
            until=_to_utc(until),
            schemas=dict(_parse_pair("--schema", each) for each in schemas),
        )
        document = reports.report(session.settings, engine, out, scope)
    return CommandResult(document, lambda: _show_report(document, out))


def _show_report(document: dict[str, Any], out: Path | str) -> None:
    table(
        ("SEVERITY", "ABOUT", "FINDING", "COMMAND"),
        [
            tuple(each[name] for name in ("severity", "about", "text", "command"))
            for each in document["findings"]
        ],
    )
    found = count(len(document["findings"]), "finding")
    click.echo(f"{found} in {count(len(document['topics']), 'topic')}: {out}/report.html")


@pipeline.command()
@click.argument("query")
@MAYBE_ARCHIVE
@click.option(
    "--stream",
    is_flag=True,
    help="Query the topics as streams. The query stops at the current end of the topics.",
)
@click.option("-f", "--follow", is_flag=True, help="With --stream: continue until Ctrl-C.")
@click.option(
    "--mode", type=click.Choice(["append", "update"]), default="append", show_default=True,
    help="With --stream: `update` prints the changed rows of an aggregation.",
)  # fmt: skip
@click.option(
    "--from", "start", type=click.Choice(["earliest", "latest"]), default="earliest",
    show_default=True,
    help="With --stream: the position at which a query without a checkpoint starts.",
)  # fmt: skip
@click.option(
    "--to-topic", "target", metavar="TOPIC", default="",
    help="With --stream: send each row to this topic, as a message with the columns key and value.",
)  # fmt: skip
@click.option(
    "--partitions",
    type=click.IntRange(1, 4096),
    help="The number of partitions if --to-topic creates the topic.",
)
@click.option(
    "--into", metavar="TABLE", default="",
    help="With --stream: add the rows to this table of the archive, which is created if it does not"
    " exist.",
)  # fmt: skip
@click.option(
    "--checkpoint", type=FOLDER,
    help="With --stream: the directory that stores the position of the query.",
)  # fmt: skip
@spark_options
@json_option
@connected
def sql(
    session: Session,
    *,
    query: str,
    folder: Path | str | None,
    stream: bool,
    follow: bool,
    mode: str,
    start: str,
    target: str,
    partitions: int | None,
    into: str,
    checkpoint: Path | None,
    master: str | None,
    conf: tuple[str, ...],
    as_json: bool,
) -> None:
    """Query topics as SQL tables.

    For example, for topic access, the table topic_access contains the messages in the archive and
    in Redis, and dlq_access contains the dead letters. With --archive, you can also query
    parsed_access, quarantine_access, and each `table_NAME` that --into created.

    With --stream, the query reads the topics from Redis as streams. If you add --json, the command
    prints one object per row.
    """
    from streamqd.spark import need_spark
    from streamqd.spark.pipelines.prompt import Prompt

    if stream:
        if folder is not None and not into:
            raise click.UsageError("--stream reads Redis only; remove --archive")
        if target and checkpoint is None:
            raise click.UsageError("--to-topic requires --checkpoint, so no row is sent twice")
        if into:
            _check_into(folder, mode, target, checkpoint)
        need_spark()
        from streamqd.spark.pipelines.standing import StandingQuery

        asked = StandingQuery(query, mode, start, follow, target, partitions or 0, into)
        _run_standing_query(session, asked, folder, checkpoint, master, conf, as_json)
        return
    if follow or target or checkpoint or partitions or into:
        raise click.UsageError(
            "--follow, --to-topic, --into, --partitions and --checkpoint require --stream"
        )
    with lend_engine(session, "sql", master, conf) as engine:
        archive = _open_archive(session, folder)
        fits = answers.column_check("json" if as_json else "table")
        found = Prompt(engine(), session.settings, archive).ask(query, fits=fits)
    if as_json:
        emit([answers.row_to_dict(found.columns, row) for row in found.rows])
    else:
        answers.show(found.columns, found.rows, "table")


def _check_into(folder: Path | str | None, mode: str, target: str, checkpoint: Path | None) -> None:
    if folder is None:
        raise click.UsageError("--into requires --archive, the directory of the table")
    if checkpoint is None:
        raise click.UsageError("--into requires --checkpoint, so no row is stored twice")
    if target:
        raise click.UsageError("--into cannot be used with --to-topic; run two queries")
    if mode == "update":
        raise click.UsageError(
            "--into cannot be used with --mode update; remove --mode, and add a watermark to an"
            " aggregation"
        )


def _run_standing_query(
    session: Session,
    asked: StandingQuery,
    folder: Path | str | None,
    checkpoint: Path | None,
    master: str | None,
    conf: tuple[str, ...],
    as_json: bool,
) -> None:
    from streamqd.spark.pipelines import standing

    form = "json" if as_json else "table"

    def show(names: list[str], rows: list[tuple[Any, ...]]) -> None:
        answers.show(names, rows, form)

    with lend_engine(session, "sql", master, conf) as engine:
        archive = _open_archive(session, folder, create=True)
        asked = dataclasses.replace(asked, archive=archive)
        fits = answers.column_check(form)
        done = standing.run(engine(), session.settings, asked, show, checkpoint, fits)
    if asked.shown:
        return
    if as_json:
        emit(dataclasses.asdict(done) | {"target": asked.target or asked.into})
    elif asked.target:
        click.echo(f"{done.entries:,} entries read, their rows sent to {asked.target}")
    else:
        click.echo(f"{done.entries:,} entries read, their rows stored in {asked.into}")


@pipeline.command()
@MAYBE_ARCHIVE
@click.option(
    "--format", "form", type=click.Choice(answers.FORMATS), default="table", show_default=True,
    help="The format of the rows. json: one object per row. csv: one line per row, after a header.",
)  # fmt: skip
@spark_options
@json_option
@connected
def shell(
    session: Session,
    *,
    folder: Path | str | None,
    form: str,
    master: str | None,
    conf: tuple[str, ...],
    as_json: bool,
) -> None:
    """Open an SQL prompt for topics, in the archive and in Redis.

    Finish each statement with a semicolon. Ctrl-C cancels a statement, and Ctrl-D exits. Statements
    from a pipe run in order, up to the first error.
    """
    from streamqd.spark.pipelines.prompt import Prompt

    with lend_engine(session, "shell", master, conf) as engine:
        archive = _open_archive(session, folder)
        prompt = Prompt(engine(), session.settings, archive)
        form = "json" if as_json else form
        (shells.run_interactively if sys.stdin.isatty() else shells.run_from_input)(prompt, form)
