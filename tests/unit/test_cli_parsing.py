"""The command line without a server: which arguments it accepts and rejects, and its errors."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from streamqd import Producer, config, supervisor
from streamqd.cli import cli
from streamqd.errors import ConfigError, ContractError, RedisUnavailableError, StartupError
from streamqd.outbox.database import connect
from streamqd.version import __version__

Invoke = Callable[..., Result]

GOOD = """
[redis]
url = "redis://127.0.0.1:1"
[topics.access]
partitions = 2
[[consumers]]
topic = "access"
group = "hits"
handler = "weblog:count_hit"
"""


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run the command in an empty directory, so that no settings from outside take effect."""
    for name in ("STREAMQ_CONFIG", "STREAMQ_REDIS__URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("STREAMQ_HTTP__BIND", "")  # another test may use the default port
    monkeypatch.chdir(tmp_path)
    return lambda *args, **options: CliRunner().invoke(cli, args, **options)


@pytest.fixture
def supervisor_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace the supervisor with a stub that returns 6. Return the list of its calls."""
    calls: list[dict[str, Any]] = []

    def run(settings: config.Settings, **options: Any) -> int:
        calls.append({"settings": settings, **options})
        return 6

    monkeypatch.setattr(supervisor, "run", run)
    return calls


def run_process(*args: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a separate process, because it forks to import handlers."""
    command = [sys.executable, "-m", "streamqd", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def command_paths(
    group: click.Group = cli, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, ...]]:
    at = click.Context(group)
    for name in group.list_commands(at):
        command = group.get_command(at, name)
        yield (*path, name)
        if isinstance(command, click.Group):
            yield from command_paths(command, (*path, name))


def find_command(path: tuple[str, ...]) -> click.Command:
    found: click.Command = cli
    for name in path:
        assert isinstance(found, click.Group)
        command = found.get_command(click.Context(found), name)
        assert command is not None
        found = command
    return found


# --- the command and its options ------------------------------------------------------------------


def test_command_list_is_complete() -> None:
    assert {" ".join(path) for path in command_paths()} == {
        *("check", "status", "partitions", "produce", "tail", "pending", "init"),
        *("delayed", "delayed list", "delayed show", "delayed now", "delayed cancel"),
        *("outbox", "outbox create", "outbox check", "outbox run", "outbox status"),
        *("schedule", "schedule list", "schedule show", "schedule next", "schedule add"),
        *("schedule edit", "schedule pause", "schedule resume", "schedule run"),
        *("schedule remove", "schedule prune"),
        *("topic", "topic create", "topic list", "topic describe", "topic settings"),
        *(
            "topic grow",
            "topic delete",
            "trim",
            "doctor",
            "doctor stream",
            "top",
            "why",
            "stack",
            "scale",
            "console",
        ),
        *("group", "group list", "group describe", "group reset", "group delete", "group adopt"),
        *("group stop", "group start", "trace"),
        *("retry", "retry list", "retry now", "retry cancel"),
        *("dlq", "dlq list", "dlq stats", "dlq show", "dlq replay", "dlq purge", "dlq export"),
        *("dlq audit", "config", "config show", "config schema"),
        *("pause", "resume", "move", "drain", "forget", "rebalance", "reload"),
        *("control", "control list", "control clear"),
        *("pipeline", "pipeline archive", "pipeline compact", "pipeline replay"),
        *("pipeline run", "pipeline sql", "pipeline shell", "pipeline report"),
        "pipeline reparse",
    }


@pytest.mark.parametrize("path", [(), *command_paths()], ids=" ".join)
def test_every_command_has_help_of_80_columns(invoke: Invoke, path: tuple[str, ...]) -> None:
    for option in ("-h", "--help"):
        result = invoke(*path, option)
        assert result.exit_code == 0
        assert result.stdout.startswith("Usage: ")
        assert max(map(len, result.stdout.splitlines())) <= 80


# These commands run until a signal, and their output is a log.
SERVING = {("outbox", "run"), ("console",)}


@pytest.mark.parametrize("path", list(command_paths()), ids=" ".join)
def test_every_command_accepts_json(path: tuple[str, ...]) -> None:
    command = find_command(path)
    if not isinstance(command, click.Group) and path not in SERVING:
        assert "--json" in {name for option in command.params for name in option.opts}


SHORT = {
    "-n": "--limit",
    "-p": "--partition",
    "-g": "--group",
    "-k": "--key",
    "-f": "--follow",
    "-H": "--header",
    "-o": "--out",
    "-y": "--yes",
    "-r": "--reason",
    "-w": "--wait",
    "-t": "--topic",
    "-a": "--archive",
    "-s": "--sort",
    "-i": "--interval",
}
# For these commands, the long option has another meaning, such as a target instead of a filter.
OTHERWISE = {("dlq", "replay", "--partition"), ("dlq", "--reason"), ("topic", "grow", "--wait")}


@pytest.mark.parametrize("path", list(command_paths()), ids=" ".join)
def test_short_option_has_one_meaning_in_all_commands(path: tuple[str, ...]) -> None:
    """A letter means the same long option in every command that has either of the two."""
    for option in find_command(path).params:
        if not isinstance(option, click.Option) or option.hidden:
            continue
        short = {each for each in option.opts if len(each) == 2}
        long = [each for each in option.opts if len(each) > 2]
        for each in short:
            assert SHORT[each] in long
        for name, belongs in SHORT.items():
            if belongs in long and not {(*path, belongs), (path[0], belongs)} & OTHERWISE:
                assert name in short


@pytest.mark.parametrize(
    ("args", "instead"),
    [
        (("drain", "web-1", "-n"), "--dry-run"),
        (("pause", "access", "-w", "-t", "5s"), "--timeout"),
        (("topic", "create", "access", "-p", "4"), "--partitions"),
    ],
)
def test_old_short_option_names_its_replacement(
    invoke: Invoke, args: tuple[str, ...], instead: str
) -> None:
    """If the meaning of a letter has changed, using it is an error that names the new option."""
    result = invoke(*args)
    assert result.exit_code == 2
    assert f"pass {instead}" in result.stderr


def test_help_lists_commands_under_headings(invoke: Invoke) -> None:
    """The help lists every command under a heading that names its task."""
    lines = invoke("--help").stdout.splitlines()
    first = lines.index("Start:")
    shown: dict[str, list[str]] = {}
    for line in lines[first:]:
        if line.endswith(":") and not line.startswith(" "):
            shown[line[:-1]] = []
        elif line.startswith("  ") and line[2] != " " and len(line.split()) > 1:
            shown[[*shown][-1]].append(line.split()[0])
    names = [name for each in shown.values() for name in each]
    assert set(cli.list_commands(click.Context(cli))) <= set(names)
    assert "Other" not in shown
    assert "produce" in shown["Send and read"]


def test_version_option_prints_the_version(invoke: Invoke) -> None:
    assert invoke("--version").stdout.startswith(f"streamqd {__version__} (Python 3.")


def test_completion_is_printed(invoke: Invoke) -> None:
    assert "_STREAMQD_COMPLETE=bash_source" in invoke("--help").stdout


def test_mistyped_command_suggests_the_nearest(invoke: Invoke) -> None:
    result = invoke("prodce")

    assert result.exit_code == 2
    assert "Did you mean 'produce'?" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    "args",
    [
        ("--nonsense",),
        ("-v", "-q", "status"),
        ("--log-level", "loud", "status"),
        ("--burst", "status"),
        ("--only", "access/hits", "status"),
        ("produce", "access", "x", "--from", "-"),
        ("produce", "access", "--key", "a", "--key-regex", "b"),
        ("produce", "access", "--from", "missing.log"),
        ("produce", "access", "--from", "-", "--format", "csv"),
        ("produce", "access", "--from", "-", "--key-field", "k"),
        ("produce", "access", "--from", "-", "--key-regex", "("),
        ("produce", "access", "--from", "-", "--header", "nonsense"),
        ("produce", "access", "--from", "-", "--header", "a=\udcff"),
        ("produce", "access", "--from", "-", "--delay", "soon"),
        ("produce", "access", "--from", "-", "--partition", "-1"),
        ("pending", "access", "--sort", "name"),
        ("pending", "access", "--limit", "0"),
        ("dlq", "show", "access"),
        ("dlq", "replay", "access"),
        ("dlq", "replay", "access", "--all", "--id", "0:1-0"),
        ("dlq", "purge", "access"),
        ("dlq", "purge", "access", "--id", "0:1-0", "--older-than", "1d"),
        ("topic", "create", "access", "--partitions", "0"),
        ("topic",),
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_2_with_one_sentence(invoke: Invoke, args: tuple[str, ...]) -> None:
    Path("streamq.toml").write_text(GOOD)

    result = invoke(*args)

    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert args == ("topic",) or "Error: " in result.stderr


# --- configuration --------------------------------------------------------------------------------


def test_all_configuration_problems_are_printed(invoke: Invoke) -> None:
    Path("streamq.toml").write_text('[redis]\nurll = "x"\n[daemon]\nlease_ttl = "soon"\n')

    result = invoke("status")

    assert result.exit_code == 3
    assert result.stderr.startswith("Error: the configuration has 2 problems:\n")
    assert "redis.urll" in result.stderr
    assert "daemon.lease_ttl" in result.stderr


def test_missing_configuration_file_is_an_error(invoke: Invoke) -> None:
    result = invoke("--config", "missing.toml", "status")

    assert result.exit_code == 3
    assert result.stderr.count("\n") == 1
    assert "missing.toml" in result.stderr


@pytest.mark.parametrize("name", ["..", ".", ".hidden", "../orders", "a/b"])
def test_topic_name_that_resembles_a_path_is_refused(invoke: Invoke, name: str) -> None:
    """A topic `..` is refused. It once erased an archive, after `produce ..` had created it."""
    Path("streamq.toml").write_text('[redis]\nurl = "redis://127.0.0.1:1/0"\n')
    for words in (["produce", name, "--from", "-"], ["topic", "create", name]):
        refused = invoke(*words, input="hi\n")
        assert refused.exit_code in (2, 8), refused.output
        assert "and no dot first" in refused.stderr
    with pytest.raises(ValueError, match="and no dot first"):
        Producer().send(name, "x")


def test_configuration_file_is_found_in_order(invoke: Invoke) -> None:
    Path("one.toml").write_text('[daemon]\ninstance = "one"\n')
    Path("two.toml").write_text('[daemon]\ninstance = "two"\n')
    Path("streamq.toml").write_text('[daemon]\ninstance = "three"\n')

    def instance(*args: str, **env: str) -> str:
        shown = invoke(*args, "config", "show", "--json", env=env)
        return str(json.loads(shown.stdout)["daemon"]["instance"])

    assert instance("-c", "one.toml", STREAMQ_CONFIG="two.toml") == "one"
    assert instance(STREAMQ_CONFIG="two.toml") == "two"
    assert instance() == "three"
    assert instance(STREAMQ_DAEMON__INSTANCE="four") == "four"


def test_config_show_prints_equivalent_toml(invoke: Invoke) -> None:
    Path("streamq.toml").write_text(GOOD)
    Path("shown.toml").write_text(invoke("config", "show").stdout)

    first = config.as_document(config.load("streamq.toml"))
    second = config.as_document(config.load("shown.toml"))

    assert first == second
    assert tomllib.loads(Path("shown.toml").read_text())["topics"]["access"]["partitions"] == 2


def test_passwords_are_never_shown(invoke: Invoke) -> None:
    Path("streamq.toml").write_text('[redis]\nurl = "redis://me:hunter2@localhost:1"\n')
    Path("streamq.toml").chmod(0o600)

    for args in (("config", "show"), ("config", "show", "--json"), ("-v", "status")):
        result = invoke(*args)
        assert "hunter2" not in result.output
    assert "***" in invoke("config", "show").stdout


def test_config_schema_prints_json(invoke: Invoke) -> None:
    schema = json.loads(invoke("config", "schema").stdout)

    assert {"redis", "daemon", "topics", "consumers"} <= schema["properties"].keys()


# --- the daemon -----------------------------------------------------------------------------------


def test_streamqd_without_a_command_runs_the_daemon(
    invoke: Invoke, supervisor_calls: list[dict[str, Any]]
) -> None:
    Path("streamq.toml").write_text(GOOD)

    result = invoke("-l", "warning", "--log-format", "json", "--only", "access/hits", "--burst")

    assert result.exit_code == 6
    [call] = supervisor_calls
    assert (call["burst"], call["only"]) == (True, ("access/hits",))
    assert (call["settings"].log.level, call["settings"].log.format) == ("warning", "json")
    Path("streamq.toml").write_text(GOOD.replace("partitions = 2", "partitions = 5"))
    again = call["load"]()
    assert again.topics["access"].partitions == 5
    assert again.log.level == "warning"


@pytest.mark.parametrize(("option", "level"), [("-v", "debug"), ("-q", "warning"), ("", "info")])
def test_verbosity_sets_the_level(
    invoke: Invoke, supervisor_calls: list[dict[str, Any]], option: str, level: str
) -> None:
    Path("streamq.toml").write_text(GOOD)
    invoke(*filter(None, [option]))

    assert supervisor_calls[0]["settings"].log.level == level


def test_daemon_does_not_run_without_a_configuration(
    invoke: Invoke, supervisor_calls: list[dict[str, Any]]
) -> None:
    result = invoke()

    assert (result.exit_code, supervisor_calls) == (2, [])
    assert "streamqd init" in result.stderr


@pytest.mark.parametrize("only", ["access", "/hits", "access/", "a/b/c"])
def test_only_option_requires_topic_and_group(
    invoke: Invoke, supervisor_calls: list[dict[str, Any]], only: str
) -> None:
    Path("streamq.toml").write_text(GOOD)
    result = invoke("--only", only)

    assert (result.exit_code, supervisor_calls) == (2, [])
    assert "TOPIC/GROUP" in result.stderr


@pytest.mark.parametrize("args", [("status", "--log-level", "info"), ("produce", "access", "-q")])
def test_misplaced_global_option_error_shows_its_position(
    invoke: Invoke, args: tuple[str, ...]
) -> None:
    result = invoke(*args)

    assert result.exit_code == 2
    assert "goes before the command: streamqd " in result.stderr


def test_dlq_commands_accept_only_one_selection(invoke: Invoke) -> None:
    both = invoke("dlq", "replay", "access", "--all", "--id", "0:1-1")
    neither = invoke("dlq", "purge", "access")

    assert "--id cannot be used with --all" in both.stderr
    assert "--older-than DURATION" in neither.stderr


def test_invalid_topic_name_is_refused_before_a_send(invoke: Invoke) -> None:
    result = invoke("produce", "no name!", "--from", "-", input="a")

    assert result.exit_code == 2
    assert result.stderr.startswith("Error: 'no name!' is not a valid topic name (use ")


def test_check_reports_an_unwritable_state_directory(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_, **__: False)
    Path("streamq.toml").write_text(GOOD)

    result = invoke("check")

    assert result.exit_code == 1
    assert "problem  daemon.state_dir: " in result.stdout


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (StartupError(5, ["it runs already"]), 5, "Error: it runs already\n"),
        (ConfigError(["a.b: wrong"]), 3, "Error: a.b: wrong\n"),
        (RedisUnavailableError("no answer", sent=False), 4, "Error: no answer\n"),
        (ContractError("odd"), 1, "Error: ContractError: odd (-v prints the traceback)\n"),
        (KeyError("k"), 1, "Error: KeyError: 'k' (-v prints the traceback)\n"),
        (KeyboardInterrupt(), 130, "\n"),
    ],
)
def test_daemon_failure_is_printed_as_one_sentence(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, text: str
) -> None:
    def fail(*_args: object, **_options: object) -> int:
        raise error

    monkeypatch.setattr(supervisor, "run", fail)
    Path("streamq.toml").write_text(GOOD)

    result = invoke("--log-format", "text")

    assert (result.exit_code, result.stderr) == (code, text)


def test_verbose_shows_a_traceback(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "run", lambda *_a, **_o: {}["k"])
    Path("streamq.toml").write_text(GOOD)

    result = invoke("-v", "--log-format", "text")

    assert result.exit_code == 1
    assert "Traceback" in result.stderr


def test_refused_start_is_printed_in_the_log_format(invoke: Invoke) -> None:
    """A fatal error at the start is printed in the format of the log."""
    Path("streamq.toml").write_text('[log]\nformat = "json"\n[daemon]\nlease_tll = "1s"\nx = 1\n')
    for style in ((), ("--log-format", "auto"), ("-v",)):
        ran = run_process(*style)
        told = [json.loads(line) for line in ran.stderr.splitlines()]
        assert ran.returncode == 3
        assert {(each["event"], each["code"]) for each in told} == {("start.refused", 3)}
        assert any("daemon.lease_tll" in each["error"] for each in told)
        assert ("traceback" in told[0]) == (style == ("-v",))
    assert run_process("--log-format", "text").stderr.startswith("Error: ")


# --- init -----------------------------------------------------------------------------------------


def test_init_writes_a_working_configuration(invoke: Invoke) -> None:
    result = invoke("init", "new/project")

    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "wrote new/project/streamq.toml",
        "wrote new/project/weblog.py",
        "wrote new/project/streamqd.service",
    ]
    checked = run_process("-c", "new/project/streamq.toml", "check", "--json")
    report = json.loads(checked.stdout)
    assert (checked.returncode, report["ok"]) == (0, True)
    assert [each["level"] for each in report["findings"]] == ["ok", "ok", "skipped"]
    assert "the daemon is not running" in report["findings"][-1]["text"]
    unit = Path("new/project/streamqd.service").read_text()
    assert f"--config {Path('new/project/streamq.toml').absolute()}" in unit


def test_init_writes_a_working_example_of_schedules(invoke: Invoke) -> None:
    result = invoke("init", "project", "--example")
    assert "wrote project/reports.py" in result.stdout.splitlines()
    checked = run_process("-c", "project/streamq.toml", "check", "--json")
    assert (checked.returncode, json.loads(checked.stdout)["ok"]) == (0, True)
    since = ("--from", "2027-01-01", "--count", "2", "--json")
    told = run_process("-c", "project/streamq.toml", "schedule", "next", "minutely", *since)
    assert [each["tick"] for each in json.loads(told.stdout)["rows"]] == [
        "2027-01-01T00:00:00Z",
        "2027-01-01T00:01:00Z",
    ]
    assert "Redis does not answer" in told.stderr


def test_init_writes_a_working_example_of_an_outbox(invoke: Invoke) -> None:
    result = invoke("init", "project", "--example", "outbox")
    assert result.stdout.splitlines() == [
        f"wrote project/{name}"
        for name in ("streamq.toml", "shop.py", "billing.py", "streamqd.service")
    ]
    checked = run_process("-c", "project/streamq.toml", "check", "--json")
    assert (checked.returncode, json.loads(checked.stdout)["ok"]) == (0, True)
    assert run_process("-c", "project/streamq.toml", "outbox", "create").returncode == 0
    command = [sys.executable, "shop.py", "9.50", "-1", "3"]
    placed = subprocess.run(command, cwd="project", capture_output=True, text=True, timeout=60)
    assert placed.stdout.splitlines() == [
        "placed order 1",
        "not placed: a price must not be negative",
        "placed order 2",
    ]
    with connect("sqlite:///project/shop.db") as database:
        assert [json.loads(row.payload)["price"] for row in database.read_oldest(10)] == [9.5, 3]


def test_init_quotes_paths_in_the_unit(invoke: Invoke) -> None:
    invoke("init", "my 100% project")

    unit = Path("my 100% project/streamqd.service").read_text()
    whole = str(Path("my 100% project").absolute()).replace("%", "%%")
    assert f'--config "{whole}/streamq.toml"' in unit
    assert f"WorkingDirectory={whole}\n" in unit


def test_init_never_overwrites(invoke: Invoke) -> None:
    Path("weblog.py").write_text("mine")

    result = invoke("init", ".")

    assert result.exit_code == 8
    assert "already contains weblog.py" in result.stderr
    assert {path.name for path in Path().iterdir()} == {"weblog.py"}
    assert Path("weblog.py").read_text() == "mine"


# --- no server ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        *(("status",), ("partitions",), ("pending", "access"), ("tail", "access")),
        *(("topic", "list"), ("dlq", "list"), ("topic", "create", "access")),
        ("produce", "access", "--from", "-"),
    ],
    ids=" ".join,
)
def test_command_reports_that_the_embedded_server_is_down(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]
) -> None:
    monkeypatch.setattr("streamqd.producer.sender.PAUSES", ())
    Path("streamq.toml").write_text('[redis]\nurl = "embedded:"\n')

    result = invoke("-c", "streamq.toml", *args, input="x\n")

    assert result.exit_code == 4
    assert result.stderr == (
        "Error: no streamqd is running with streamq.toml; start it with"
        " `streamqd --config streamq.toml`\n"
    )


def test_socket_of_another_user_is_not_reported_as_missing() -> None:
    """A command of another user does not report that the daemon is not running."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "streamq.toml").write_text(
            '[redis]\nurl = "embedded:"\n[daemon]\nstate_dir = "state"\n'
        )
        (folder / "state").mkdir(0o700 if os.geteuid() == 0 else 0o000)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            result = CliRunner().invoke(cli, ["-c", f"{folder}/streamq.toml", "status"])
        finally:
            if root:
                os.seteuid(0)
        (folder / "state").chmod(0o700)

    assert result.exit_code == 4
    assert f"no permission to open the server's socket in {folder}/state" in result.stderr
    assert "run the command as " in result.stderr


def test_check_names_a_module_without_a_handler(invoke: Invoke) -> None:
    """The error names the configured module, and shows how a handler is declared."""
    Path("work.py").write_text("def obey(message): ...\n")
    Path("streamq.toml").write_text(
        '[redis]\nurl = "redis://127.0.0.1:1"\n[daemon]\nhandlers = ["work"]\n'
    )

    report = json.loads(run_process("-c", "streamq.toml", "check", "--json").stdout)

    [text] = [each["text"] for each in report["findings"] if each["about"] == "handlers"]
    assert text.startswith("daemon.handlers: work declares no handler; put @handler(topic=")


def test_check_names_a_slow_import(invoke: Invoke) -> None:
    """`check` names an import that hangs while it is still waiting for it."""
    Path("work.py").write_text("import time\ntime.sleep(60)\n")
    Path("streamq.toml").write_text(
        '[redis]\nurl = "redis://127.0.0.1:1"\n[daemon]\nhandlers = ["work"]\nboot_timeout = "4s"\n'
    )

    shown = run_process("-c", "streamq.toml", "check")

    assert "importing work (limit: daemon.boot_timeout, 4 s)\n" in shown.stderr
    assert "it took longer than 4 s" in shown.stdout


def test_status_without_redis_exits_4(invoke: Invoke) -> None:
    Path("streamq.toml").write_text(GOOD)

    result = invoke("status")

    assert result.exit_code == 4
    assert "127.0.0.1:1" in result.stderr
    assert result.stderr.count("\n") == 1


def test_check_prints_all_findings(invoke: Invoke) -> None:
    Path("streamq.toml").write_text(GOOD)

    result = run_process("check", "--json")

    report = json.loads(result.stdout)
    problems = [each["about"] for each in report["findings"] if each["level"] == "problem"]
    assert (result.returncode, report["ok"]) == (1, False)
    assert problems == ["handlers", "redis"]
    shown = run_process("check")
    assert "no module named weblog" in shown.stdout
    assert shown.stdout.splitlines()[-1] == "2 problems, no warnings"


@pytest.mark.parametrize(
    "verb", [("check",), (), ("--only", "orders/bill")], ids=["check", "start", "only"]
)
def test_module_import_failure_is_reported_once(invoke: Invoke, verb: tuple[str, ...]) -> None:
    """If a module cannot be imported, its handlers are not reported as missing in addition."""
    Path("streamq.toml").write_text(
        '[daemon]\nhandlers = ["broken"]\n'
        '[[consumers]]\ntopic = "orders"\ngroup = "bill"\nmax_attempts = 3\n'
    )
    Path("broken.py").write_text("import no_such_library\n")

    result = run_process(*verb)

    assert result.returncode == (1 if verb == ("check",) else 3)
    said = (result.stdout + result.stderr).splitlines()
    marks = ("problem ", "start.refused")
    (named,) = [line for line in said if any(mark in line for mark in marks)]
    assert "cannot import broken: ModuleNotFoundError: No module named 'no_such_library'" in named


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_check_reports_an_http_address_in_use(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """`check` reports an address that is in use.

    The daemon would start without a reachable metrics endpoint.
    """
    family = socket.AF_INET if kind == "tcp" else socket.AF_UNIX
    with socket.socket(family, socket.SOCK_STREAM) as other:
        other.bind(("127.0.0.1", 0) if kind == "tcp" else "pages.sock")
        other.listen()
        bind = "127.0.0.1:{1}".format(*other.getsockname()) if kind == "tcp" else "unix:pages.sock"
        monkeypatch.setenv("STREAMQ_HTTP__BIND", bind)
        Path("streamq.toml").write_text('[redis]\nurl = "redis://127.0.0.1:1"\n')

        found = json.loads(run_process("check", "--json").stdout)["findings"]
        (told,) = [each for each in found if each["about"] == "http.bind"]
        assert told["level"] == "problem"
        assert "is in use by another process" in told["text"]
    found = json.loads(run_process("check", "--json").stdout)["findings"]
    assert "http.bind" not in [each["about"] for each in found], (
        "a stale socket does not block the address"
    )
    if kind == "unix":
        assert Path("pages.sock").is_socket(), "and the file stays"


@pytest.mark.parametrize("path", sorted(command_paths()), ids=" ".join)
def test_commands_accept_config_after_their_name(path: tuple[str, ...]) -> None:
    """`streamqd topic list -c FILE` means the same as `streamqd -c FILE topic list`."""
    names = {name for param in find_command(path).params for name in param.opts}
    assert {"-c", "--config"} <= names


def test_config_after_a_command_is_read(invoke: Invoke, tmp_path: Path) -> None:
    """The last `--config` wins, whether it is before or after the command."""
    (tmp_path / "a.toml").write_text(GOOD)
    (tmp_path / "b.toml").write_text("[daemon]\nlease_tll = 3\n")
    assert "lease_tll" in invoke("-c", "a.toml", "config", "show", "-c", "b.toml").output
    assert "lease_tll" not in invoke("-c", "b.toml", "config", "show", "-c", "a.toml").output


@pytest.mark.parametrize(
    "path",
    [
        *(("retry", "now"), ("delayed", "now")),
        *(("schedule", name) for name in ("add", "edit", "pause", "resume", "run")),
    ],
    ids=" ".join,
)
def test_commands_without_confirmation_accept_yes(path: tuple[str, ...]) -> None:
    """Scripts may pass `--yes` to every command that changes messages."""
    names = {name for param in find_command(path).params for name in param.opts}
    assert {"-y", "--yes"} <= names
