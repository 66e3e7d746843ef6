"""`streamqd pipeline`: what runs on Spark. Imports it only when a pipeline is run."""

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

from streamqd.cli.arguments import Command, Duration, Size, json_option
from streamqd.cli.command import CommandResult, answering, connected
from streamqd.cli.engine import bar
from streamqd.cli.engine import engine as lend_engine
from streamqd.cli.output import emit, json_text, table
from streamqd.cli.session import Session
from streamqd.words import count

if TYPE_CHECKING:
    from streamqd.spark.pipelines.compact import Compacted
    from streamqd.spark.pipelines.standing import Standing

TOPICS = click.option(
    "-t", "--topic", "topics", metavar="TOPIC", multiple=True,
    help="This topic; may be repeated. Default: all.",
)  # fmt: skip
ARCHIVE = click.option(
    "-a", "--archive", "folder", type=click.Path(path_type=Path), required=True,
    help="Folder of the archive, under the same path for all of Spark's processes.",
)  # fmt: skip
MAYBE_ARCHIVE = click.option(
    "-a", "--archive", "folder", type=click.Path(path_type=Path),
    help="Folder of the archive. Default: only what is in Redis.",
)  # fmt: skip
TIMES = ("%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S.%f")


def spark_options(command: Command) -> Command:
    """Give a command `--master` and `--conf`."""
    for option in (
        click.option(
            "--conf", metavar="NAME=VALUE", multiple=True, help="Setting of Spark; may be repeated."
        ),
        click.option(
            "--master", metavar="URL",
            help="Where Spark runs, as spark://host:7077. Default: local[*].",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


@click.group()
def pipeline() -> None:
    """Archive topics, read archives, run jobs: on Spark.

    Needs the extra spark, pip install '.[spark]' in a clone of streamqd, and Java 17 or newer.
    """


@pipeline.command()
@TOPICS
@ARCHIVE
@click.option("--every", type=Duration(), help="Do it again and again, so long after the last.")
@click.option(
    "--batch-rows", type=click.IntRange(1, 10_000_000), default=1_000_000, show_default=True,
    help="Entries of one batch at most.",
)  # fmt: skip
@click.option(
    "--allow-loss", is_flag=True, help="Go on where entries were trimmed before they were archived."
)
@spark_options
@json_option
@connected
def archive(
    session: Session,
    *,
    topics: tuple[str, ...],
    folder: Path,
    every: float | None,
    batch_rows: int,
    allow_loss: bool,
    master: str | None,
    conf: tuple[str, ...],
    as_json: bool,
) -> None:
    """Store topics as Parquet files, each entry once.

    Can be killed and run again at any time. With archive = "required" in a topic's configuration
    nothing is trimmed before it is stored.
    """
    from streamqd.spark.pipelines.archive import Archiver

    with lend_engine(session, "archive", master, conf) as engine:
        archiver = Archiver(
            session.settings, folder, engine.context, bar(session),
            batch_rows=batch_rows, allow_loss=allow_loss,
        )  # fmt: skip
        with contextlib.closing(archiver):
            while True:
                done = archiver.run(topics)
                document = {
                    "archive": str(folder),
                    "rows": sum(each.rows for each in done),
                    "start_seconds": engine.start_seconds,
                    "topics": [dataclasses.asdict(each) for each in done],
                }
                _show_archived(document, as_json)
                if every is None:
                    return
                time.sleep(every)


def _show_archived(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit(document)
        return
    table(
        ("TOPIC", "ROWS", "BYTES", "FILES", "MISSING", "SECONDS"),
        [
            tuple(each[name] for name in ("topic", "rows", "size", "files", "missing", "seconds"))
            for each in document["topics"]
        ],
    )
    click.echo(f"{count(document['rows'], 'row')} archived in {document['archive']}")


@pipeline.command()
@TOPICS
@ARCHIVE
@click.option(
    "--target", type=Size(), default="256MiB", show_default=True,
    help="Bytes of files that are written into one.",
)  # fmt: skip
@click.option(
    "--grace", type=Duration(), default="1h", show_default=True,
    help="How long replaced files stay for those who are reading them.",
)  # fmt: skip
@spark_options
@answering
def compact(
    session: Session,
    *,
    topics: tuple[str, ...],
    folder: Path,
    target: int,
    grace: float,
    master: str | None,
    conf: tuple[str, ...],
) -> CommandResult:
    """Write the many small files of an archive into few."""
    from streamqd.spark.pipelines.compact import compact as run

    with lend_engine(session, "compact", master, conf) as engine:
        done = run(session.settings, folder, engine.context, topics, target=target, grace=grace)
    document = {"archive": str(folder), "topics": [dataclasses.asdict(each) for each in done]}
    return CommandResult(document, lambda: _show_compacted(done))


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
    show_default=True, help="Archive and Redis, Redis, the archive, or the dead letters.",
)  # fmt: skip
@click.option("--to", "target", metavar="TOPIC", default="", help="Default: the same topic.")
@click.option("--since", type=click.DateTime(TIMES), help="Entries from this time on, UTC.")
@click.option("--until", type=click.DateTime(TIMES), help="Entries before this time, UTC.")
@click.option("-k", "--key", "keys", multiple=True, help="This key; may be repeated.")
@click.option(
    "-H", "--header", "headers", metavar="NAME=VALUE", multiple=True,
    help="Has this header; may be repeated, all must be there.",
)  # fmt: skip
@click.option("--where", metavar="SQL", default="", help="A condition over the columns.")
@click.option("--rate", type=click.FloatRange(min=0.001), help="Messages per second at most.")
@click.option(
    "--name", default="",
    help="Name of this replay. Under the same name no message is sent twice within 30 days.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only count.")
@spark_options
@answering
def replay(
    session: Session,
    *,
    topic: str,
    folder: Path | None,
    tier: str,
    target: str,
    since: dt.datetime | None,
    until: dt.datetime | None,
    keys: tuple[str, ...],
    headers: tuple[str, ...],
    where: str,
    rate: float | None,
    name: str,
    dry_run: bool,
    master: str | None,
    conf: tuple[str, ...],
) -> CommandResult:
    """Send messages of TOPIC again. Their header x-replay-of names the entry they were."""
    from streamqd.spark.pipelines import replay as replays
    from streamqd.spark.pipelines.storage import Archive

    choice = replays.ReplayFilter(
        since=_utc(since),
        until=_utc(until),
        keys=keys,
        headers=dict(_pair("--header", each) for each in headers),
        where=where,
        tier=tier,
    )
    archive = None if folder is None else Archive(folder)
    with lend_engine(session, "replay", master, conf) as engine:
        done = replays.replay(
            session.settings, engine(), topic, choice,
            archive=archive, target=target, rate=rate, name=name, dry_run=dry_run,
        )  # fmt: skip
    verb = "would be sent" if dry_run else "sent"
    return CommandResult(
        dataclasses.asdict(done),
        f"{count(done.rows, 'message')} of {topic} {verb} to {done.target}",
    )


@pipeline.command()
@click.argument("job", metavar="MODULE:FUNCTION")
@MAYBE_ARCHIVE
@click.option(
    "--checkpoints", type=click.Path(path_type=Path), required=True,
    help="Folder for the checkpoints of the job's queries.",
)  # fmt: skip
@click.option(
    "--set", "arguments", metavar="NAME=VALUE", multiple=True,
    help="An argument of the job; may be repeated.",
)  # fmt: skip
@spark_options
@answering
def run(
    session: Session,
    *,
    job: str,
    folder: Path | None,
    checkpoints: Path,
    arguments: tuple[str, ...],
    master: str | None,
    conf: tuple[str, ...],
) -> CommandResult:
    """Run a function of your own, with Spark, topics and their sink prepared.

    It gets a streamqd.spark.pipelines.run.Job; what it returns is printed with --json.
    """
    from streamqd.spark.pipelines import run as jobs
    from streamqd.spark.pipelines.checkpoints import hold
    from streamqd.spark.pipelines.storage import Archive

    with lend_engine(session, job, master, conf) as engine:
        function = jobs.load(job, session.settings.base_dir)
        with hold(session.settings, checkpoints):
            made = jobs.Job(
                engine(),
                session.settings,
                checkpoints.absolute(),
                None if folder is None else Archive(folder),
                dict(_pair("--set", each) for each in arguments),
            )
            returned = jobs.run(made, function)
    return CommandResult(returned, lambda: None)


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise click.UsageError(f"{option} {text}: write NAME=VALUE")
    return name, value


def _utc(moment: dt.datetime | None) -> dt.datetime | None:
    return moment and moment.replace(tzinfo=dt.UTC)


@pipeline.command()
@TOPICS
@MAYBE_ARCHIVE
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), required=True,
    help="Folder of the report. It must not be there yet.",
)  # fmt: skip
@click.option("--since", type=click.DateTime(TIMES), help="Entries from this time on, UTC.")
@click.option("--until", type=click.DateTime(TIMES), help="Entries before this time, UTC.")
@click.option("--overwrite", is_flag=True, help="Replace the report that is in the folder.")
@spark_options
@answering
def report(
    session: Session,
    *,
    topics: tuple[str, ...],
    folder: Path | None,
    out: Path,
    since: dt.datetime | None,
    until: dt.datetime | None,
    overwrite: bool,
    master: str | None,
    conf: tuple[str, ...],
) -> CommandResult:
    """Write figures of topics: dead letters by cause, key skew, latencies, throughput.

    As a page to read, report.html, and as JSON and Parquet for programs.
    """
    from streamqd.spark.pipelines.report import Reporter
    from streamqd.spark.pipelines.report_queries import Window
    from streamqd.spark.pipelines.storage import Archive

    window = Window(since=_utc(since), until=_utc(until))
    archive = None if folder is None else Archive(folder)
    with lend_engine(session, "report", master, conf) as engine:
        reporter = Reporter(session.settings, engine, bar(session), archive=archive, window=window)
        document = reporter.run(out, topics, overwrite=overwrite)
    return CommandResult(document, lambda: _show_report(document, out))


def _show_report(document: dict[str, Any], out: Path) -> None:
    table(
        ("TOPIC", "ROWS", "BYTES", "LETTERS", "PARTITIONS", "FULLEST/MEAN", "HOTTEST KEY %"),
        [
            (
                *(each[name] for name in ("topic", "rows", "bytes", "letters", "partition_count")),
                each["rows_max_over_mean"],
                None if each["hottest_key_share"] is None else 100 * each["hottest_key_share"],
            )
            for each in document["topics"]
        ],
    )
    for each in document["topics"]:
        if each["rows"]:
            click.echo(f"{each['topic']}: {each['recommendation']}")
    click.echo(f"{count(len(document['topics']), 'topic')} in {out / 'report.html'}")


@pipeline.command()
@click.argument("query")
@MAYBE_ARCHIVE
@click.option(
    "--stream", is_flag=True, help="Over topics as streams: new rows each time, and to the end."
)
@click.option("-f", "--follow", is_flag=True, help="With --stream: go on until interrupted.")
@click.option(
    "--mode", type=click.Choice(["append", "update"]), default="append", show_default=True,
    help="With --stream: update shows the rows of an aggregation, each time they change.",
)  # fmt: skip
@click.option(
    "--from", "start", type=click.Choice(["earliest", "latest"]), default="earliest",
    show_default=True, help="With --stream: where to begin without a checkpoint.",
)  # fmt: skip
@click.option(
    "--to", "target", metavar="TOPIC", default="",
    help="With --stream: send the rows, as key and value, into this topic.",
)  # fmt: skip
@click.option(
    "--partitions", type=click.IntRange(1, 4096), help="Create that topic with so many partitions."
)
@click.option(
    "--checkpoint", type=click.Path(path_type=Path),
    help="With --stream: folder that remembers how far it is.",
)  # fmt: skip
@spark_options
@json_option
@connected
def sql(
    session: Session,
    *,
    query: str,
    folder: Path | None,
    stream: bool,
    follow: bool,
    mode: str,
    start: str,
    target: str,
    partitions: int | None,
    checkpoint: Path | None,
    master: str | None,
    conf: tuple[str, ...],
    as_json: bool,
) -> None:
    """Ask over topics as tables: topic_access is what is archived and in Redis, dlq_access its
    dead letters.

    With --stream over topics as streams, from Redis; with --json each row is an object then.
    """
    from streamqd.spark.pipelines import tables
    from streamqd.spark.pipelines.storage import Archive

    if stream:
        if folder is not None:
            raise click.UsageError("--stream reads Redis only: leave --archive away")
        if target and checkpoint is None:
            raise click.UsageError("--to needs --checkpoint, so that nothing is sent twice")
        from streamqd.spark.pipelines.standing import Standing

        asked = Standing(query, mode, start, follow, target, partitions or 0)
        _stand(session, asked, checkpoint, master, conf, as_json)
        return
    if follow or target or checkpoint or partitions:
        raise click.UsageError("--follow, --to, --partitions and --checkpoint need --stream")
    archive = None if folder is None else Archive(folder)
    with lend_engine(session, "sql", master, conf) as engine:
        names, rows = tables.ask(engine(), session.settings, archive, query)
    if as_json:
        emit([_readable(row) for row in rows])
    else:
        _show_rows(names, rows)


def _stand(
    session: Session,
    asked: Standing,
    checkpoint: Path | None,
    master: str | None,
    conf: tuple[str, ...],
    as_json: bool,
) -> None:
    from streamqd.spark.pipelines import standing

    def show(names: list[str], rows: list[dict[str, Any]]) -> None:
        if as_json:
            for row in rows:
                click.echo(json_text(_readable(row)))
        else:
            _show_rows(names, rows)
        sys.stdout.flush()

    with lend_engine(session, "sql", master, conf) as engine:
        done = standing.run(engine(), session.settings, asked, show, checkpoint)
    if asked.target:
        document = dataclasses.asdict(done) | {"target": asked.target}
        if as_json:
            emit(document)
        else:
            click.echo(f"{done.entries:,} entries read, their rows sent to {asked.target}")


def _show_rows(names: list[str], rows: list[dict[str, Any]]) -> None:
    table(
        [name.upper() for name in names], [[_readable(row[name]) for name in names] for row in rows]
    )


def _readable(value: Any) -> Any:
    """A value of a row as text and JSON can have it."""
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("utf-8", "backslashreplace")
    if isinstance(value, dict):
        return {str(name): _readable(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(each) for each in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)
