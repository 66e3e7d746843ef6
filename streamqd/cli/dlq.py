"""`streamqd dlq`: dead letters, from looking at them to bringing them back."""

from __future__ import annotations

import click

from streamqd.admin import dead, letters
from streamqd.admin.dead import Choice
from streamqd.admin.pages import server_unix_ms
from streamqd.cli.arguments import Duration, json_option, yes_option
from streamqd.cli.output import age, confirm, count, emit, printable, table
from streamqd.cli.session import Session, pass_session
from streamqd.errors import Refused
from streamqd.store.client import Link

ALL = click.option("--all", "all_", is_flag=True, help="All letters of the topic (or the group).")
IDS = click.option(
    "--id", "ids", metavar="PARTITION:MS-SEQ", multiple=True, help="This letter; may be repeated."
)
GROUP = click.option("-g", "--group", help="Only letters of this group.")


@click.group()
def dlq() -> None:
    """Look at dead letters, bring them back, delete them."""


@dlq.command("list")
@click.argument("topic", required=False)
@GROUP
@click.option(
    "-n", "--limit", type=click.IntRange(1, 10_000), default=20, show_default=True,
    help="Rows of one page.",
)  # fmt: skip
@click.option("--cursor", default="", help="Go on behind the page that printed this cursor.")
@json_option
@pass_session
def list_(
    session: Session,
    topic: str | None,
    group: str | None,
    limit: int,
    cursor: str,
    as_json: bool,
) -> None:
    """Show the letters of a topic, the newest first.

    Without TOPIC: how many each topic has.
    """
    with session.link() as link:
        if topic is None:
            _overview(session, link, as_json)
            return
        seen = letters.listed(link, session.keys, topic, group=group, limit=limit, cursor=cursor)
        now = server_unix_ms(link)
    if as_json:
        emit(seen)
        return
    if not seen.rows:
        click.echo(f"no {'more ' if cursor else ''}dead letters in {topic}" + _for(group))
        return
    table(
        ("ID", "GROUP", "REASON", "AGE", "TRIES", "KEY", "ERROR"),
        [
            (
                row.id,
                row.group,
                row.reason,
                age(None if row.failed_unix_ms is None else now - row.failed_unix_ms),
                row.attempts,
                None if row.key is None else printable(row.key)[:20],
                ": ".join(filter(None, (row.error_class, row.error_message))),
            )
            for row in seen.rows
        ],
    )
    session.note(f"{count(seen.total, 'dead letter')} in {topic}")
    if seen.cursor:
        session.note(f"more: --cursor {seen.cursor}")


def _overview(session: Session, link: Link, as_json: bool) -> None:
    rows = letters.overview(link, session.keys)
    now = server_unix_ms(link)
    if as_json:
        emit(rows)
    elif not rows:
        click.echo("no dead letters")
    else:
        table(
            ("TOPIC", "DEAD LETTERS", "NEWEST", "OLDEST"),
            [
                (
                    row.topic,
                    row.total,
                    age(row.newest_unix_ms and now - row.newest_unix_ms),
                    age(row.oldest_unix_ms and now - row.oldest_unix_ms),
                )
                for row in rows
            ],
        )


@dlq.command()
@click.argument("topic")
@json_option
@pass_session
def stats(session: Session, topic: str, as_json: bool) -> None:
    """Count the newest letters of a topic by what killed them."""
    with session.link() as link:
        found = letters.causes(link, session.keys, topic)
        now = server_unix_ms(link)
    if as_json:
        emit(found)
        return
    if not found.causes:
        click.echo(f"no dead letters in {topic}")
        return
    table(
        ("COUNT", "GROUP", "REASON", "ERROR", "NEWEST", "AGE"),
        [
            (
                each.count,
                each.group,
                each.reason,
                each.error_class or "-",
                each.newest,
                age(now - each.newest_unix_ms),
            )
            for each in found.causes
        ],
    )
    if not found.complete:
        session.note(f"only the newest {found.looked_at:,} of {found.total:,} were counted")


@dlq.command()
@click.argument("topic")
@click.argument("letter_id", metavar="PARTITION:MS-SEQ")
@json_option
@pass_session
def show(session: Session, topic: str, letter_id: str, as_json: bool) -> None:
    """Show everything that is known of one letter."""
    with session.link() as link:
        letter = letters.show(link, session.keys, topic, letter_id)
        now = server_unix_ms(link)
    if as_json:
        emit(letter)
        return
    failed = None if letter.failed_unix_ms is None else f"{age(now - letter.failed_unix_ms)} ago"
    pairs: list[tuple[str, object]] = [
        ("id", letter.id),
        ("uid", letter.uid),
        ("topic", f"{letter.topic}, partition {letter.partition}"),
        ("group", letter.group),
        ("reason", letter.reason),
        ("died", failed),
        ("on", letter.instance),
        ("handler", letter.handler),
        ("attempts", letter.attempts),
        ("crashes", letter.crashes),
        ("replays", letter.replays or None),
        ("pid", None if letter.pid is None else str(letter.pid)),
        ("signal", letter.signal),
        ("exit code", letter.exit_code),
        ("memory", None if letter.rss is None else f"{letter.rss:,} bytes"),
        ("key", letter.key),
        *((f"header {name}", value) for name, value in (letter.headers or {}).items()),
        *letter.other.items(),
        ("error", ": ".join(filter(None, (letter.error_class, letter.error_message)))),
    ]
    for name, value in pairs:
        if value is not None and value != "":
            shown = printable(value) if isinstance(value, bytes) else printable(str(value))
            click.echo(f"{printable(name) + ':':<12}{shown}")
    if letter.traceback:
        click.echo()
        click.echo(printable(letter.traceback, lines=True).rstrip())
    click.echo()
    click.echo(f"payload, {len(letter.payload):,} bytes:")
    click.echo(printable(letter.payload, lines=True))


@dlq.command()
@click.argument("topic")
@ALL
@IDS
@GROUP
@yes_option
@json_option
@pass_session
def replay(
    session: Session,
    topic: str,
    all_: bool,
    ids: tuple[str, ...],
    group: str | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Bring letters back to the groups that they failed in.

    Their attempts begin anew, and no other group sees them. Each letter moves in one step and
    cannot be replayed twice.
    """
    choice = Choice(_ids(ids, all_, "--id PARTITION:MS-SEQ or --all"), group)
    with session.link() as link:
        if all_ and _ask(
            link, session, topic, choice, "Replay {} of {}?", yes, "replayed", as_json
        ):
            return
        done = dead.replay(link, session.keys, topic, choice)
    if as_json:
        emit(done)
    else:
        click.echo(f"{count(done.replayed, 'dead letter')} of {topic} replayed" + _for(group))
        if done.gone:
            click.echo(f"{count(done.gone, 'letter')} had been replayed or purged meanwhile")
    if done.refused:
        reasons = [f"{count(number, 'letter')}: {why}" for why, number in done.refused.items()]
        raise Refused(f"not replayed: {'; '.join(reasons)}")


@dlq.command()
@click.argument("topic")
@ALL
@IDS
@click.option("--older-than", type=Duration(), metavar="DURATION", help="Died longer ago, as 7d.")
@GROUP
@yes_option
@json_option
@pass_session
def purge(
    session: Session,
    topic: str,
    all_: bool,
    ids: tuple[str, ...],
    older_than: float | None,
    group: str | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Delete letters for good."""
    if ids and older_than is not None:
        raise click.UsageError("--id names letters; --older-than chooses among all of them")
    names = _ids(
        ids,
        all_ or older_than is not None,
        "--id PARTITION:MS-SEQ, --older-than DURATION or --all",
    )
    with session.link() as link:
        before = None
        if older_than is not None:
            before = server_unix_ms(link) - round(older_than * 1000)
        choice = Choice(names, group, before)
        if _ask(link, session, topic, choice, "Delete {} of {} for good?", yes, "purged", as_json):
            return
        done = dead.purge(link, session.keys, topic, choice)
    if as_json:
        emit(done)
    else:
        click.echo(f"{count(done.purged, 'dead letter')} of {topic} purged" + _for(group))


def _ask(
    link: Link,
    session: Session,
    topic: str,
    choice: Choice,
    question: str,
    yes: bool,
    nothing: str,
    as_json: bool,
) -> bool:
    """Confirm what would happen. Returns whether there is nothing to do."""
    if yes:
        return False
    found = dead.count(link, session.keys, topic, choice)
    if not found and not as_json:
        click.echo(f"no dead letters in {topic}" + _for(choice.group) + f", nothing {nothing}")
        return True
    if found:
        letters_of = count(found, "dead letter")
        confirm(question.format(letters_of, topic + _for(choice.group)), yes)
    return False


def _ids(ids: tuple[str, ...], all_: bool, ways: str) -> tuple[str, ...]:
    if ids and all_:
        raise click.UsageError("--id and --all exclude each other")
    if not ids and not all_:
        raise click.UsageError(f"say which letters: {ways}")
    return ids


def _for(group: str | None) -> str:
    return f" for {group}" if group else ""
