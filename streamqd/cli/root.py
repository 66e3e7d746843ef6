"""The top-level command, with its global options and its error messages.

Without the name of a command, `streamqd` runs the daemon. Errors are printed as sentences.
"""

from __future__ import annotations

import io
import logging
import os
import platform
import signal
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import click

from streamqd import config, logs
from streamqd.cli import early
from streamqd.cli.completion import add_completion
from streamqd.cli.output import apply_style, printable
from streamqd.cli.session import Session, pass_session
from streamqd.errors import (
    ConfigError,
    DatabaseUnavailableError,
    HandlerLoadError,
    InvalidRequestError,
    InvalidValueError,
    MessageTooLargeError,
    RedisResponseError,
    RedisUnavailableError,
    RequestRefusedError,
    SparkError,
    StartupError,
    StreamqdError,
)
from streamqd.version import __version__

EXIT_UNEXPECTED = 1
EXIT_USAGE = 2
EXIT_CONFIG = 3
EXIT_REDIS = 4
EXIT_REFUSED = 8
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_PIPE = 128 + signal.SIGPIPE  # status that a shell reports for a program killed by SIGPIPE


class LazyGroup(click.Group):
    """A group that imports a command only when it is used, so that the command line starts fast.

    `places` maps the name of each command to `module:name`.
    """

    def __init__(self, *args: Any, places: dict[str, str], **extra: Any) -> None:
        super().__init__(*args, **extra)
        self.places = places

    def list_commands(self, _ctx: click.Context | None = None) -> list[str]:
        """Return the names of the commands, without importing them."""
        return sorted(self.places)

    def get_command(self, _ctx: click.Context | None, name: str) -> click.Command | None:
        """Import a command and return it. Return None if no command has this name."""
        if name not in self.places:
            return None
        module, _, attribute = self.places[name].partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return add_completion(_with_config(command))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the first argument names. The error suggests similar names."""
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand as error:
            raise click.NoSuchCommand(
                error.command_name, possibilities=self.list_commands(ctx), ctx=ctx
            ) from None


def _with_config(command: click.Command) -> click.Command:
    """Allow `--config` after the name of a command or subcommand as well."""
    if not any({"-c", "--config"} & {*param.opts} for param in command.params):
        command.params.append(
            click.Option(
                ["-c", "--config", "later_config_path"],
                hidden=True, expose_value=False, callback=_take_config,
                type=click.Path(path_type=Path),
            )
        )  # fmt: skip
    if isinstance(command, click.Group) and not isinstance(command, LazyGroup):
        for each in command.commands.values():
            _with_config(each)
    return command


def _take_config(ctx: click.Context, _param: click.Parameter, value: Path | None) -> None:
    session = ctx.find_object(Session)
    if value is not None and session is not None:
        session.config_path = value


class Root(LazyGroup):
    """The top-level group. Its commands return exit codes, and errors are printed as sentences."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command and exit with its exit code."""
        extra["standalone_mode"] = False
        session = extra.setdefault("obj", Session())
        code = EXIT_UNEXPECTED
        try:
            returned = super().main(*args, **extra)
            code = returned if isinstance(returned, int) else 0
        except click.ClickException as error:
            _print_error(_format_error(error), session)
            _hint(error)
            code = error.exit_code
        except click.Abort:
            code = EXIT_INTERRUPTED
        except Exception as error:  # noqa: BLE001 - the last chance to turn it into a sentence
            code = _report_error(error, session)
        sys.exit(code)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands under headings. Commands without a heading come last."""
        known = self.list_commands(ctx)
        sections = {title: [n for n in names if n in known] for title, names in SECTIONS.items()}
        sections["Other"] = sorted({*known}.difference(*sections.values()))
        for title, names in sections.items():
            found = [(name, self.get_command(ctx, name)) for name in names]
            rows = [(name, each.get_short_help_str(60)) for name, each in found if each]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=12)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Exit silently if the program that reads its output closed the pipe."""
        try:
            returned = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            _leave_pipe()
        return returned


def _format_error(error: click.ClickException) -> str:
    text = io.StringIO()
    error.show(text)
    return text.getvalue().rstrip("\n")


def _print_error(text: str, session: Session) -> None:
    """Print an error with control characters escaped. On a terminal, the word `Error:` is red."""
    before, word, after = printable(text, lines=True).partition("Error: ")
    red = apply_style(word.strip(), "bad") + " " if word else ""
    click.echo(before + red + after, err=True, color=None if session.colored else False)


def _hint(error: click.ClickException) -> None:
    """Print a hint if a global option was passed after the command instead of before it."""
    if not isinstance(error, click.NoSuchOption) or error.ctx is None or not error.ctx.parent:
        return
    name = error.option_name
    if any(name in (*each.opts, *each.secondary_opts) for each in cli.params):
        verb = error.ctx.info_name
        click.echo(f"{name} goes before the command: streamqd {name} … {verb} …", err=True)


def _report_error(error: Exception, session: Session) -> int:
    """Print or log the problems that an error describes, and return the exit code."""
    problems, code = _problems(error, session)
    style = _style_of_daemon(session)
    if style is not None and logs.is_json(style):
        _log_refusal(error, problems, code, verbose=session.verbose)
        return code
    if session.verbose:
        lines = "".join(traceback.format_exception(error)).rstrip()
        click.echo(printable(lines, lines=True), err=True)
    if isinstance(error, ConfigError) and len(problems) > 1:
        lines = "".join(f"\n  {problem}" for problem in problems)
        problems = [f"the configuration has {len(problems)} problems:{lines}"]
    for problem in problems:
        _print_error(f"Error: {problem}", session)
    return code


def _problems(error: Exception, session: Session) -> tuple[list[str], int]:
    """Return the problems that an error describes, each as a sentence, and the exit code."""
    match error:
        case StartupError():
            return list(error.problems), error.code
        case ConfigError() if error.problems:
            return list(error.problems), EXIT_CONFIG
        case ConfigError() | HandlerLoadError():
            code = EXIT_CONFIG
        case RedisUnavailableError() | RedisResponseError() | DatabaseUnavailableError():
            code = EXIT_REDIS
        case SparkError():
            code = EXIT_UNEXPECTED
        case InvalidRequestError() | MessageTooLargeError():
            code = EXIT_USAGE
        case InvalidValueError():
            hint = "run `streamqd doctor` for the fix"
            return [f"{error}; {hint}"], EXIT_REFUSED
        case RequestRefusedError():
            code = EXIT_REFUSED
        case _:
            hint = "" if session.verbose else " (-v prints the traceback)"
            return [f"{type(error).__name__}: {error}{hint}"], EXIT_UNEXPECTED
    return [str(error)], code


def _style_of_daemon(session: Session) -> str | None:
    """Return the setting log.format if the daemon is to run, or None for a command.

    If the configuration is invalid, the value comes from the settings that are valid.
    """
    if not session.is_daemon:
        return None
    try:
        return session.settings.log.format
    except ConfigError as error:
        if error.salvaged is not None:
            return str(error.salvaged.log.format)
        return session.overrides.get("log.format", "auto")


def _log_refusal(error: Exception, problems: list[str], code: int, *, verbose: bool) -> None:
    """Log the reasons why the daemon does not start, as JSON events."""
    logs.setup(role="supervisor", style="json")
    exc = error if verbose or not isinstance(error, StreamqdError) else None
    for problem in problems:
        logs.event("start.refused", logging.ERROR, error=problem, code=code, exc=exc)
        exc = None
    logs.flush(1.0)
    logs.close()


def _leave_pipe() -> NoReturn:
    """Exit silently, because the program that reads the output (such as `head`) closed the pipe."""
    # Python flushes standard output again at exit, which would fail and print an error.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(EXIT_PIPE)


def _version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"streamqd {__version__} (Python {platform.python_version()})")
        ctx.exit()


SECTIONS = {
    "Start": ("init", "check", "config"),
    "Send and read": ("produce", "tail", "delayed", "schedule", "outbox"),
    "Inspect": (
        "status",
        "partitions",
        "pending",
        "top",
        "trace",
        "why",
        "stack",
        "doctor",
        "scale",
        "console",
    ),
    "Failed messages": ("dlq", "retry"),
    "Topics and groups": ("topic", "group", "trim"),
    "Manage the fleet": (
        *("pause", "resume", "move", "drain", "forget", "rebalance", "reload", "control"),
    ),
    "Spark": ("pipeline",),
}
_FILES = {
    "check": ("check",),
    "config": ("config",),
    "console": ("console",),
    "dlq": ("dlq",),
    "doctor": ("doctor",),
    "fleet": ("control", "drain", "forget", "move", "pause", "rebalance", "reload", "resume"),
    "group": ("group",),
    "init": ("init",),
    "messages": ("delayed", "pending", "retry", "tail"),
    "outbox_relay": ("outbox",),
    "pipeline": ("pipeline",),
    "produce": ("produce",),
    "scale": ("scale",),
    "schedule": ("schedule",),
    "stack": ("stack",),
    "status": ("partitions", "status"),
    "top": ("top",),
    "topic": ("topic",),
    "trace": ("trace",),
    "trim": ("trim",),
    "why": ("why",),
}
COMMANDS = {name: f"streamqd.cli.{file}:{name}" for file, names in _FILES.items() for name in names}

EPILOG = """
\b
Exit codes of commands: 0 done, 1 problems found, 2 usage, 3 configuration,
4 Redis or database, 8 refused or not found. For the exit codes of the daemon,
see the page "Exit codes" of the documentation.
\b
To complete commands, options, topics, groups and instances in bash, add this
line to ~/.bashrc (zsh_source and ~/.zshrc for zsh; fish_source for fish):
  eval "$(_STREAMQD_COMPLETE=bash_source streamqd)"
"""


@click.group(
    cls=Root,
    places=COMMANDS,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    epilog=EPILOG,
)
@click.option(
    "-c",
    "--config",
    "config_path",
    metavar="FILE",
    envvar="STREAMQ_CONFIG",
    type=click.Path(path_type=Path),
    help="The configuration file. Can also follow the command. Default: $STREAMQ_CONFIG, or"
    " ./streamq.toml if it exists.",
)
@click.option(
    "-l",
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="Override the setting log.level.",
)
@click.option(
    "--log-format",
    type=click.Choice(["auto", "text", "json"]),
    help="Override the setting log.format.",
)
@click.option(
    "-v", "--verbose", is_flag=True, help="Set the log level to debug, and print tracebacks."
)
@click.option(
    "-q", "--quiet", is_flag=True, help="Set the log level to warning, and print only results."
)
@click.option(
    "--color/--no-color",
    default=None,
    help="Print with or without colors. Default: with colors on a terminal, unless NO_COLOR is"
    " set.",
)
@click.option("--burst", is_flag=True, help="Daemon: exit when no messages are left.")
@click.option(
    "--reload",
    "watch",
    is_flag=True,
    help="Daemon: reload the handlers and the configuration when a file changes. Intended for"
    " development.",
)
@click.option(
    "--only",
    metavar="TOPIC/GROUP",
    multiple=True,
    help="Daemon: run only this consumer. May be repeated.",
)
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_version,
    help="Show the version and exit.",
)  # fmt: skip
@pass_session
@click.pass_context
def cli(
    ctx: click.Context,
    session: Session,
    config_path: Path | None,
    log_level: str | None,
    log_format: str | None,
    verbose: bool,
    quiet: bool,
    color: bool | None,
    burst: bool,
    watch: bool,
    only: tuple[str, ...],
) -> int | None:
    """Run message handlers on Redis Streams.

    To run the daemon, use `streamqd --config FILE` without a command.
    """
    if verbose and quiet:
        raise click.UsageError("--verbose cannot be used with --quiet")
    if config_path is None:
        config_path = config.find()
    if ctx.invoked_subcommand is not None:
        early.resume_collection()
        early.restore_signals()
    session.config_path, session.verbose, session.quiet = config_path, verbose, quiet
    session.color = color
    if not session.colored:
        ctx.color = False  # otherwise, click uses color on a terminal only
    level = log_level or ("debug" if verbose else "warning" if quiet else None)
    session.overrides = {
        name: value
        for name, value in (("log.level", level), ("log.format", log_format))
        if value is not None
    }
    if ctx.invoked_subcommand is None:
        return _run(session, burst, only, watch)
    if burst or only or watch:
        option = "--burst" if burst else "--only" if only else "--reload"
        raise click.UsageError(f"{option} is an option of the daemon, which runs without a command")
    return None


def _run(session: Session, burst: bool, only: tuple[str, ...], watch: bool) -> int:
    if burst and watch:
        raise click.UsageError("--burst cannot be used with --reload")
    if session.config_path is None:
        raise click.UsageError(
            "no configuration file; pass --config FILE, or run `streamqd init DIR` to create one"
        )
    for name in only:
        topic_name, slash, group = name.partition("/")
        if not (topic_name and slash and group) or "/" in group:
            raise click.UsageError(f"--only {name} is not TOPIC/GROUP")
    session.is_daemon = True
    # These modules are imported here, because commands do not need them and should start fast.
    from streamqd import startup, supervisor

    early.resume_collection()
    try:
        settings = session.settings
    except ConfigError as error:
        raise startup.collect_problems(error) from None
    return supervisor.run(
        settings,
        load=session.load,
        burst=burst,
        only=only,
        watch=watch,
        stopped=early.stopped,
    )
