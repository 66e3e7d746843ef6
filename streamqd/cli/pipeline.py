"""`streamqd pipeline`: what runs on Spark. Imports it only when a pipeline is run."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import time
from pathlib import Path
from typing import Any

import click

from streamqd.cli.arguments import Duration, Size, json_option
from streamqd.cli.engine import bar
from streamqd.cli.engine import engine as lend_engine
from streamqd.cli.output import count, emit, table
from streamqd.cli.session import Session, pass_session

MASTER = click.option(
    "--master", metavar="URL", help="Where Spark runs, as spark://host:7077. Default: local[*]."
)
CONF = click.option(
    "--conf", metavar="NAME=VALUE", multiple=True, help="Setting of Spark; may be repeated."
)
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


@click.group()
def pipeline() -> None:
    """Archive topics, read archives, run jobs: on Spark.

    Needs the extra spark, pip install '.[spark]' in a clone of streamqd, and Java 17 or newer.
    """


# --- verbs ----------------------------------------------------------------------------------------


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
@MASTER
@CONF
@json_option
@pass_session
def archive(
    session: Session,
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
@MASTER
@CONF
@json_option
@pass_session
def compact(
    session: Session,
    topics: tuple[str, ...],
    folder: Path,
    target: int,
    grace: float,
    master: str | None,
    conf: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write the many small files of an archive into few."""
    from streamqd.spark.pipelines.compact import compact as run

    with lend_engine(session, "compact", master, conf) as engine:
        done = run(session.settings, folder, engine.context, topics, target=target, grace=grace)
    if as_json:
        emit({"archive": str(folder), "topics": [dataclasses.asdict(each) for each in done]})
        return
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
@MASTER
@CONF
@json_option
@pass_session
def replay(
    session: Session,
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
    as_json: bool,
) -> None:
    """Send messages of TOPIC again. Their header x-replay-of names the entry they were."""
    from streamqd.spark.pipelines import replay as replays
    from streamqd.spark.pipelines.storage import Archive

    choice = replays.ReplayFilter(
        since=since and since.replace(tzinfo=dt.UTC),
        until=until and until.replace(tzinfo=dt.UTC),
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
    if as_json:
        emit(dataclasses.asdict(done))
        return
    verb = "would be sent" if dry_run else "sent"
    click.echo(f"{count(done.rows, 'message')} of {topic} {verb} to {done.target}")


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
@MASTER
@CONF
@json_option
@pass_session
def run(
    session: Session,
    job: str,
    folder: Path | None,
    checkpoints: Path,
    arguments: tuple[str, ...],
    master: str | None,
    conf: tuple[str, ...],
    as_json: bool,
) -> None:
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
    if as_json:
        emit(returned)


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise click.UsageError(f"{option} {text}: write NAME=VALUE")
    return name, value
