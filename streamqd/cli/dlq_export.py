"""`streamqd dlq export`: dead letters as JSON lines."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import click

from streamqd.admin import dead_letters
from streamqd.admin.dead_letters.passes import STOPPED
from streamqd.cli.arguments import json_option, yes_option
from streamqd.cli.deeds import NOT_AUDITED
from streamqd.cli.dlq_choice import (
    EXIT_INTERRUPTED,
    IDS,
    check_group,
    chosen,
    filter_options,
    interruptible,
)
from streamqd.cli.output import confirm, count, emit
from streamqd.cli.session import Session, pass_session
from streamqd.errors import Refused


@click.command()
@click.argument("topic")
@IDS
@filter_options
@click.option(
    "-o", "--out", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
    help="Write to this file, whole or not at all. Default: standard output.",
)  # fmt: skip
@yes_option
@json_option
@pass_session
def export(
    session: Session,
    /,
    topic: str,
    ids: tuple[str, ...],
    out: Path | None,
    yes: bool,
    as_json: bool,
    **filters: Any,
) -> int:
    """Write letters as JSON lines, every field of each; all of them without a filter.

    The letters stay. A field that is not UTF-8 is {"base64": …} in place of the text. With --json
    and --out, standard output gets the result; without --out, only the lines.
    """
    if out is not None and out.exists():
        confirm(f"{out} exists. Replace it?", yes)
    with session.link() as link, interruptible() as stop:
        choice = chosen(link, filters, ids)
        check_group(session, link, topic, choice)
        work = dead_letters.Export(link, session.keys, topic, choice, stop=stop)
        with _written(out) as file:
            for line in work.lines():
                file.write(line + "\n")
            if out is not None and stop():
                raise KeyboardInterrupt
        done = work.finish(f"to {out}" if out is not None else "")
    if out is not None and as_json:
        emit(done)
    else:
        session.note(
            f"{count(done.exported, 'dead letter')} of {topic} exported"
            + (f" to {out}" if out is not None else "")
        )
    if not done.audited:
        session.note(NOT_AUDITED)
    return EXIT_INTERRUPTED if done.ended == STOPPED else 0


@contextlib.contextmanager
def _written(path: Path | None) -> Iterator[IO[str]]:
    """A file that appears when all is written; standard output for None."""
    if path is None:
        yield sys.stdout
        return
    try:
        number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error.strerror}") from None
    part = Path(name)
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)
