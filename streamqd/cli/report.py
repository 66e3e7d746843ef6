"""`streamqd pipeline report`: what is in topics and their dead letters, in figures."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import click

from streamqd.cli.arguments import json_option
from streamqd.cli.engine import bar
from streamqd.cli.engine import engine as lend_engine
from streamqd.cli.output import count, emit, table
from streamqd.cli.pipeline import CONF, MASTER, MAYBE_ARCHIVE, TIMES, TOPICS
from streamqd.cli.session import Session, pass_session


@click.command()
@TOPICS
@MAYBE_ARCHIVE
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), required=True,
    help="Folder of the report. It must not be there yet.",
)  # fmt: skip
@click.option("--since", type=click.DateTime(TIMES), help="Entries from this time on, UTC.")
@click.option("--until", type=click.DateTime(TIMES), help="Entries before this time, UTC.")
@click.option("--overwrite", is_flag=True, help="Replace the report that is in the folder.")
@MASTER
@CONF
@json_option
@pass_session
def report(
    session: Session,
    topics: tuple[str, ...],
    folder: Path | None,
    out: Path,
    since: dt.datetime | None,
    until: dt.datetime | None,
    overwrite: bool,
    master: str | None,
    conf: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write figures of topics: dead letters by cause, key skew, latencies, throughput.

    As a page to read, report.html, and as JSON and Parquet for programs.
    """
    from streamqd.spark.pipelines.report import Reporter
    from streamqd.spark.pipelines.report_queries import Window
    from streamqd.spark.pipelines.storage import Archive

    window = Window(
        since=since and since.replace(tzinfo=dt.UTC), until=until and until.replace(tzinfo=dt.UTC)
    )
    archive = None if folder is None else Archive(folder)
    with lend_engine(session, "report", master, conf) as engine:
        reporter = Reporter(session.settings, engine, bar(session), archive=archive, window=window)
        document = reporter.run(out, topics, overwrite=overwrite)
    if as_json:
        emit(document)
    else:
        _show(document, out)


def _show(document: dict[str, Any], out: Path) -> None:
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
