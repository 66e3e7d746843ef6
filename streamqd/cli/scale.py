"""`streamqd scale`: print the number of workers that each group can use, or serve it over HTTP."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from http import HTTPStatus

import click

from streamqd import http, logs
from streamqd.admin.scaling import GroupScale, ScaleView, measure
from streamqd.cli.arguments import DURATION
from streamqd.cli.command import CommandResult, answering
from streamqd.cli.output import json_text, print_unreadable, printable, table
from streamqd.cli.session import Session
from streamqd.errors import (
    RedisResponseError,
    RedisUnavailableError,
    RequestRefusedError,
    StreamqdError,
)
from streamqd.http import HttpRequest, HttpResponse, HttpServer
from streamqd.http.access import JSON_TYPE, Access

SHARED_SECONDS = 1.0  # seconds for which the response of one check is reused for all requests
READ_TIMEOUT = 3.0  # seconds per round trip to Redis, while an autoscaler waits for the response
LISTEN_SECONDS = 5.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@click.command(short_help="Show how many workers each group can use.")
@click.argument("names", metavar="[TOPIC[/GROUP]]...", nargs=-1)
@click.option(
    "--target",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="The number of backlog messages per worker.",
)
@click.option(
    "--within",
    type=DURATION,
    default="30s",
    show_default=True,
    help="Count retries, delayed sends and schedules that are due within this time.",
)
@click.option(
    "--bind",
    metavar="ADDRESS",
    help="Serve GET /scale on this address, such as 127.0.0.1:9465, until SIGTERM.",
)
@answering
def scale(
    session: Session, *, names: tuple[str, ...], target: int, within: float, bind: str | None
) -> CommandResult | int:
    """Show each group's backlog and how many workers it can use.

    The command reads all numbers from Redis, so it works even if no instance is running. With
    --bind, it serves them over HTTP, so that an autoscaler can start instances when there is a
    backlog, and stop all of them when there is none. The settings http.token_file, http.hosts and
    http.allow_public apply to that address.

    These are the columns:

    \b
    - BACKLOG: unread messages, messages in flight and due messages.
      A `+` after the number means at least that many.
    - DUE: retries, delayed sends and schedules that are due within --within.
    - BUSY: partitions with pending messages.
    - WANTED: number of workers that the group can use, which is one for each
      partition with a backlog, but at most one for each --target messages.
      It is 0 for a paused or stopped group.

    \b
    Examples:
      streamqd scale
      streamqd scale orders/billing --json
      streamqd scale --bind 127.0.0.1:9465
    """
    for name in names:
        topic, slash, group = name.partition("/")
        if not topic or "/" in group or (slash and not group):
            raise click.UsageError(f"{name} is not TOPIC or TOPIC/GROUP")

    def read_view() -> ScaleView:
        return measure(session.fleet, names, target=target, within_seconds=within)

    if bind is not None:
        return ScaleServer(session, bind, read_view).run()
    seen = read_view()
    return CommandResult(seen, lambda: _show(seen))


def _show(seen: ScaleView) -> None:
    print_unreadable(seen.unreadable)
    if not seen.groups:
        click.echo("no groups")
        return
    rows = [_row(name, each) for name, each in seen.groups.items()]
    if len(rows) > 1:
        rows.append(_row("total", seen.total))
    table(("GROUP", "BACKLOG", "DUE", "BUSY", "PARTITIONS", "WANTED"), rows)


def _row(name: str, each: GroupScale) -> tuple[object, ...]:
    backlog = each.backlog if each.backlog_exact else f"{each.backlog:,}+"
    return name, backlog, each.due, each.busy, each.partitions, each.wanted


class ScaleServer:
    """An HTTP server for `GET /scale`, and for `/livez`, which does not depend on Redis.

    If a measurement fails, for example because Redis does not reply, `/scale` returns status 503
    and a sentence. An autoscaler then keeps the number of instances. The result of a measurement is
    reused for all requests within a second.
    """

    def __init__(self, session: Session, bind: str, read_view: Callable[[], ScaleView]) -> None:
        session.overrides["http.bind"] = bind
        session.timeout = session.timeout or READ_TIMEOUT
        address = session.settings.http.address
        if address is None:
            raise click.UsageError("--bind must be HOST:PORT or unix:PATH")
        self._session = session
        self._read_view = read_view
        self._address = address
        self._redis_episode = logs.Episode("redis.lost", "redis.recovered")
        self._next_check = 0.0  # monotonic time in seconds from which a request checks again
        self._response = HttpResponse(HTTPStatus.SERVICE_UNAVAILABLE, b"")
        access = Access(session.settings.http)
        self._server = HttpServer(
            address,
            {
                "/scale": access.require_host(access.require_token(self._scale)),
                "/livez": lambda request: access.health(request, []),
            },
        )

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT.

        Raises RequestRefusedError if the server cannot listen on the address.
        """
        if fault := http.find_fault(self._address):
            raise RequestRefusedError(fault)
        with contextlib.suppress(RedisUnavailableError):
            self._read_view()  # reports a wrong name before the server starts
        log = self._session.settings.log
        logs.setup(role="scale", style=log.format, level=log.level)
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # the server's thread inherits it
        self._server.start()
        try:
            if not self._server.listening.wait(LISTEN_SECONDS) or self._server.bound is None:
                raise RequestRefusedError(
                    f"{http.format_address(self._address)} is in use by another process; pass"
                    " another address to --bind"
                )
            click.echo(f"scale: {http.format_address(self._server.bound)}/scale")
            signal.sigwait(STOP_SIGNALS)
        finally:
            self._server.stop()
            logs.close()
        return 0

    def _scale(self, _request: HttpRequest) -> HttpResponse:
        if time.monotonic() >= self._next_check:
            self._response = self._measure()
            # The interval starts at the end of the check, so that a slow server is checked less
            # often.
            self._next_check = time.monotonic() + SHARED_SECONDS
            logs.flush()
        return self._response

    def _measure(self) -> HttpResponse:
        try:
            document = json_text(self._read_view())
        except RedisUnavailableError as error:
            return self._unavailable(self._session.explain(error))
        except StreamqdError as error:
            return self._unavailable(error)
        self._redis_episode.log_recovery()
        return HttpResponse(HTTPStatus.OK, f"{document}\n".encode(), JSON_TYPE)

    def _unavailable(self, error: StreamqdError) -> HttpResponse:
        if isinstance(error, RedisUnavailableError | RedisResponseError):
            self._redis_episode.log_failure(error=str(error))
        return HttpResponse(HTTPStatus.SERVICE_UNAVAILABLE, f"{printable(str(error))}\n".encode())
