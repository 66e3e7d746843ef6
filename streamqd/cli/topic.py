"""`streamqd topic`: registering topics and looking at them."""

from __future__ import annotations

import dataclasses
import datetime as dt

import click

from streamqd.admin import topics
from streamqd.cli.arguments import json_option
from streamqd.cli.output import age, count, emit, table
from streamqd.cli.session import Session, pass_session
from streamqd.config import Topic


@click.group()
def topic() -> None:
    """Create topics and look at them."""


@topic.command()
@click.argument("name", metavar="TOPIC")
@click.option(
    "-p",
    "--partitions",
    type=click.IntRange(1, 4096),
    help="Default: what the configuration says of the topic, else 1.",
)
@json_option
@pass_session
def create(session: Session, name: str, partitions: int | None, as_json: bool) -> None:
    """Register a topic. Its number of partitions is fixed by this."""
    wanted = session.settings.topics.get(name, Topic())
    if partitions is not None:
        wanted = dataclasses.replace(wanted, partitions=partitions)
    with session.link() as link:
        done = topics.create(link, session.keys, name, wanted)
    if as_json:
        emit(done)
    else:
        verb = "created with" if done.created else "exists already, with"
        click.echo(f"{name} {verb} {count(done.partitions, 'partition')}")


@topic.command("list")
@json_option
@pass_session
def list_(session: Session, as_json: bool) -> None:
    """Show all topics."""
    with session.link() as link:
        rows = topics.listed(link, session.keys)
    if as_json:
        emit(rows)
    elif not rows:
        click.echo("no topics")
    else:
        table(
            ("TOPIC", "PARTITIONS", "MESSAGES", "SCHEDULED", "DEAD", "GROUPS"),
            [
                (
                    row.topic,
                    row.partitions,
                    row.messages,
                    row.scheduled,
                    row.dead,
                    ", ".join(row.groups) or "-",
                )
                for row in rows
            ],
        )


@topic.command()
@click.argument("name", metavar="TOPIC")
@json_option
@pass_session
def describe(session: Session, name: str, as_json: bool) -> None:
    """Show one topic, partition by partition."""
    with session.link() as link:
        detail = topics.describe(link, session.keys, name)
    if as_json:
        emit(detail)
        return
    click.echo(f"topic {name}: {count(len(detail.partitions), 'partition')}")
    if detail.created_unix_ms:
        moment = dt.datetime.fromtimestamp(detail.created_unix_ms / 1000).astimezone()
        click.echo(f"created {moment:%Y-%m-%d %H:%M:%S %z}")
    click.echo(f"groups: {', '.join(detail.groups) or 'none'}")
    retention = detail.settings.get("retention") or {}
    max_age = retention.get("max_age")
    max_length = retention.get("max_length")
    if max_age is not None or max_length is not None:
        limits = [
            f"{age(max_age * 1000)} of age" if max_age is not None else "",
            f"{max_length:,} entries per partition" if max_length is not None else "",
        ]
        click.echo(f"retention: {', '.join(filter(None, limits))}")
    click.echo()
    table(
        ("PARTITION", "MESSAGES", "EVER", "SCHEDULED", "DEAD", "LAST"),
        [
            (
                str(row.partition),
                row.messages,
                row.added,
                row.scheduled,
                row.dead,
                row.last_id or "-",
            )
            for row in detail.partitions
        ],
    )
