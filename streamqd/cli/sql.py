"""`streamqd pipeline sql`: asking over topics as tables, or as streams."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from streamqd.cli.arguments import json_option
from streamqd.cli.engine import engine as lend_engine
from streamqd.cli.output import emit, json_text, table
from streamqd.cli.pipeline import CONF, MASTER, MAYBE_ARCHIVE
from streamqd.cli.session import Session, pass_session

if TYPE_CHECKING:
    from streamqd.spark.pipelines.standing import Standing


@click.command()
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
@MASTER
@CONF
@json_option
@pass_session
def sql(
    session: Session,
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
