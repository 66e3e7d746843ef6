"""`streamqd console`: serve the web console, or add a user to its users file."""

from __future__ import annotations

import getpass
import sys
from pathlib import Path

import click

from streamqd import extras
from streamqd.cli.arguments import DIRECTORY
from streamqd.cli.session import Session, pass_session
from streamqd.cli.trace import find_in_archive
from streamqd.errors import ConfigError

ROLES = ("viewer", "operator", "admin")


@click.command(short_help="Serve the web console.")
@click.option("--bind", metavar="HOST:PORT", help="Override the setting console.bind.")
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    help="Override the port in the setting console.bind. 0 selects a free port.",
)
@click.option("--read-only", is_flag=True, help="Treat every user as a viewer.")
@click.option(
    "--users",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Override the setting console.users_file.",
)
@click.option("--proxy-header", metavar="NAME", help="Override the setting console.proxy_header.")
@click.option(
    "--proxy-from",
    metavar="PEER",
    multiple=True,
    help="Override the setting console.proxy_from. May be repeated.",
)
@click.option("--prefix", metavar="PATH", help="Override the setting console.prefix, such as /q/.")
@click.option("--trace-url", metavar="URL", help="Override the setting console.trace_url.")
@click.option("-a", "--archive", type=DIRECTORY, help="Override the setting console.archive.")
@click.option("--add-user", metavar="NAME", help="Add a user to the users file, and exit.")
@click.option(
    "--role", type=click.Choice(ROLES), default="viewer", show_default=True,
    help="The role of the user that --add-user adds.",
)  # fmt: skip
@pass_session
def console(
    session: Session,
    *,
    bind: str | None,
    port: int | None,
    read_only: bool,
    users: Path | None,
    proxy_header: str | None,
    proxy_from: tuple[str, ...],
    prefix: str | None,
    trace_url: str | None,
    archive: Path | str | None,
    add_user: str | None,
    role: str,
) -> int:
    """Serve the web console until SIGTERM.

    The first line on standard output is the address of the console. Without a users file or a
    proxy, the address contains a one-time token that logs you in as an admin. After you have used
    the token, the console prints a new link. An address that other hosts can reach requires a users
    file or an authenticating proxy.

    \b
    Examples:
      streamqd console
      streamqd console --users users.txt --add-user anna --role operator
      streamqd console --users users.txt --bind 0.0.0.0:9466
    """
    texts = {
        "console.bind": bind,
        "console.users_file": None if users is None else str(users.absolute()),
        "console.proxy_header": proxy_header,
        "console.proxy_from": ",".join(proxy_from) or None,
        "console.prefix": prefix,
        "console.trace_url": trace_url,
        "console.archive": str(archive.absolute()) if isinstance(archive, Path) else archive,
        "console.read_only": "true" if read_only else None,
    }
    session.overrides |= {name: text for name, text in texts.items() if text is not None}
    if port is not None:
        host = (bind or session.load().console.bind).rpartition(":")[0]
        session.overrides["console.bind"] = f"{host}:{port}"
    settings = session.settings
    try:
        from streamqd.console import access
    except ModuleNotFoundError as error:
        raise ConfigError(
            [f"the console needs the package {error.name}; run {extras.hint('console')}"]
        ) from None
    if add_user is not None:
        path = settings.console.users_file
        if path is None:
            raise click.UsageError(
                "--add-user needs --users FILE, or the setting console.users_file"
            )
        user = access.new_user(add_user, access.parse_role(role), _password())
        access.write_user(path, user)
        click.echo(f"{add_user} is {role} in {path}; restart the console to apply it")
        return 0
    from streamqd import console as web

    return web.run(settings, _print_line, find_in_archive)


def _print_line(line: str) -> None:
    """Print a line immediately. If standard output is closed, the console keeps running."""
    try:
        click.echo(line)
        sys.stdout.flush()
    except OSError:
        pass


def _password() -> str:
    """Read a password twice from a terminal, or once as a line of standard input."""
    if not sys.stdin.isatty():
        return sys.stdin.readline().rstrip("\n")
    first = getpass.getpass("Password: ")
    if getpass.getpass("Again: ") != first:
        raise click.UsageError("passwords do not match; nothing was written")
    return first
