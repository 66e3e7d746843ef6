"""Commands typed in a terminal, and their output: wrong words, short options and colors."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from streamqd.admin.reading import server_unix_ms
from streamqd.cli import cli
from streamqd.cli.session import Session
from streamqd.dead_letter import REASONS
from streamqd.message import LAST_ERROR
from streamqd.store import messages, topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.integration.test_admin import write_dead_letter
from tests.support.commands import HarnessAt, Run
from tests.support.daemon import toml
from tests.support.servers import Server
from tests.support.terminal import Terminal

ROOT = Path(__file__).parents[2]
Typed = Callable[..., Terminal]
pytestmark = pytest.mark.slow  # each command is a process in its own terminal
ANSI_COLOR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def run_in_terminal(file: Path, tmp_path: Path) -> Typed:
    """Run the command in a terminal of 80 columns. `keys` are typed once `until` is shown."""

    def invoke(*args: str, code: int = 0, until: str = "", keys: str = "", **env: str) -> Terminal:
        command = [sys.executable, "-m", "streamqd", "--config", str(file), *args]
        clean = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
        whole = clean | {"TERM": "xterm", "PYTHONPATH": str(ROOT)} | env
        with Terminal(command, columns=80, lines=60, cwd=tmp_path, env=whole) as terminal:
            if until:
                terminal.wait_text(until, 60)
                terminal.type(keys)
            assert terminal.wait_end(60) == code, terminal.shown
        return terminal

    return invoke


# --- values that cannot match ---------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["list", "stats", "replay", "purge", "export"])
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--reason", "nope"), REASONS),
        (("--fingerprint", "nope"), ["12 hexadecimal digits"]),
        (("--since", "1h", "--until", "2h"), ["--since must be before --until"]),
    ],
)
def test_dlq_refuses_a_reason_that_does_not_exist(
    run: Run, harness_at: HarnessAt, verb: str, words: tuple[str, ...], told: list[str]
) -> None:
    """A word that matches no dead letter is a usage error, which names the right words."""
    write_dead_letter(harness_at(0), "1-0")
    result = run("dlq", verb, "access", *words, code=2)
    assert all(word in result.stderr for word in told)
    assert not result.stdout


def test_every_reason_is_documented_and_can_be_filtered(run: Run, harness_at: HarnessAt) -> None:
    """`--reason` accepts exactly the words of the wire format."""
    page = (ROOT / "docs" / "reference" / "wire-format.md").read_text()
    table = page.partition("| Reason |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)) == sorted(REASONS)
    for reason in REASONS:
        assert run("dlq", "list", "access", "--reason", reason).stdout == "nothing matches\n"


def test_dlq_list_at_80_columns_shows_the_error(
    run_in_terminal: Typed, harness_at: HarnessAt
) -> None:
    """At 80 columns, the list shows the message of the error, without the module of its class."""
    text = "the invoice 4711 of customer 17 has no positions, so there is no sum"
    write_dead_letter(
        harness_at(1),
        "1763640000000-0",
        errorClass="shop.billing.errors.InvoiceError",
        errorMessage=text,
    )
    write_dead_letter(
        harness_at(1),
        "1763640000001-0",
        errorClass="shop.billing.errors.Short",
        errorMessage="no sum",
    )

    shown = ANSI_COLOR.sub("", run_in_terminal("dlq", "list", "access").raw).replace("\r\n", "\n")

    assert f"\n    {text}\n" in shown  # there is no room for both, so the message is shown
    assert "\n    Short: no sum\n" in shown
    assert all(len(line) <= 80 for line in shown.split("\n"))


def test_dlq_tries_include_crashed_runs(run: Run, harness_at: HarnessAt) -> None:
    """A dead letter that killed two processes and failed once has been tried three times."""
    write_dead_letter(
        harness_at(0),
        "1-0",
        reason="crashes",
        attempts="1",
        crashes="2",
        errorMessage="signal SIGSEGV",
    )
    head, row = run("dlq", "list", "access").stdout.splitlines()
    at_ = head.index("TRIES")
    assert row[at_ : at_ + 5].strip() == "3"


def test_error_of_a_retry_fits_80_columns(run_in_terminal: Typed, harness_at: HarnessAt) -> None:
    """At 80 columns, the whole error of a retry fits, not only its class."""
    harness = harness_at(0)
    harness.groups()
    harness.add("1795379457027-0", "payload", "x", "key", "customer-4711")
    harness.own("t1")
    harness.fetch()
    error = "the card was declined by the bank"
    fields = {LAST_ERROR: f"ValueError: {error}".encode(), b"payload": b"x"}
    fields |= {b"originalId": b"1795379457027-0", b"key": b"customer-4711"}
    call = messages.retry(
        harness.keys, harness.leased("t1"), [(b"m:1795379457027-0", 60.0, fields)]
    )
    assert harness.link.run(call).word == "OK"
    assert error in run_in_terminal("retry", "list", "access", "hits").shown


def test_group_state_fits_80_columns(run_in_terminal: Typed, harness_at: HarnessAt) -> None:
    """A narrow terminal always shows the state of a group."""
    harness_at(0, "invoices-of-the-north").groups()
    shown = run_in_terminal("status").shown
    assert re.search(r"access/invoices-of-the-north .* no owner", shown.replace("\n", " ")), shown
    assert "…" not in shown


@pytest.mark.parametrize(
    "words",
    [
        ("tail", "no name!"),
        ("produce", "no name!", "x"),
        ("topic", "create", "no name!"),
        ("dlq", "list", "no name!"),
        ("dlq", "show", "access", "nope"),
        ("dlq", "list", "access", "--cursor", "nope"),
        ("retry", "list", "access", "hits", "--cursor", "nope"),
        ("retry", "now", "access", "hits", "nope"),
        ("pending", "access", "--group", "hits", "--cursor", "nope"),
        ("group", "reset", "access", "hits", "--to", "nope"),
        ("doctor", "--only", "nope"),
        ("why", "access/nope"),
        ("pause", "a/b/c/d"),
        ("move", "nope", "x"),
    ],
)
def test_malformed_input_exits_2_everywhere(
    run: Run, harness_at: HarnessAt, words: tuple[str, ...]
) -> None:
    """Malformed input is a usage error (exit code 2) of every command."""
    harness_at(0).groups()
    result = run(*words, code=2)
    assert "Error: " in result.stderr


def test_every_command_refuses_a_missing_partition(run: Run, harness_at: HarnessAt) -> None:
    """Every command rejects a partition that is beyond the last one."""
    harness_at(0).groups()
    for words in (
        ("tail", "access"),
        ("partitions", "access"),
        ("retry", "list", "access", "hits"),
        ("retry", "now", "access", "hits", "--all"),
        ("delayed", "list", "access"),
        ("trim", "access", "--dry-run", "--max-age", "1h"),
    ):
        assert "3" in run(*words, "--partition", "3", code=8).stderr
    assert run("retry", "list", "access", "hits", "-k", "x").stdout == "nothing matches\n"


def test_error_without_a_terminal_names_the_option(
    run: Run, harness_at: HarnessAt, link: Connection
) -> None:
    """Without a terminal, a command that would ask a question names the option that answers it."""
    write_dead_letter(harness_at(0), "1-0")
    assert "not a terminal; pass --yes" in run("dlq", "purge", "access", "--all", code=8).stderr
    assert link.execute("XLEN", harness_at(0).dlq) == 1


# --- produce --------------------------------------------------------------------------------------


def payloads(
    link: Connection, keys: Keys, topic: str = "access", partitions: int = 3
) -> list[bytes]:
    streams = [keys.stream(topic, number) for number in range(partitions)]
    found = [link.execute("XRANGE", stream, "-", "+") for stream in streams]
    return sorted(flat[flat.index(b"payload") + 1] for page in found for _, flat in page)


def test_produce_accepts_a_payload_argument(
    run: Run, harness_at: HarnessAt, link: Connection, keys: Keys
) -> None:
    """`produce TOPIC PAYLOAD` sends one message, whatever its content."""
    harness_at(0)
    run("produce", "access", '{"id": 1}\n\nend', "--key", "k", "--format", "lines")
    run("produce", "access", "")
    assert payloads(link, keys) == [b"", b'{"id": 1}\n\nend']
    told = run("produce", "access", "{nope}", "--format", "jsonl", code=2)
    assert "the payload is not JSON" in told.stderr


def test_produce_reads_standard_input_by_default(
    run: Run, harness_at: HarnessAt, link: Connection, keys: Keys
) -> None:
    """Without a payload and without --from, `produce` reads lines from standard input."""
    harness_at(0)
    run("produce", "access", typed="one\ntwo\n")
    run("produce", "access", "--from", "-", typed="three\n")
    assert payloads(link, keys) == [b"one", b"three", b"two"]


def test_produce_does_not_create_a_misspelled_topic(
    run: Run, harness_at: HarnessAt, link: Connection, store: Store, keys: Keys
) -> None:
    """Without a terminal, a new topic needs `--create`.

    The error suggests a topic with a similar name.
    """
    harness_at(0)
    told = run("produce", "acess", "x", code=8).stderr
    assert "acess does not exist (did you mean access?); not a terminal: pass --create" in told
    assert topics.names(store) == ["access"]
    run("produce", "acess", "x", "--create")
    assert topics.names(store) == ["access", "acess"]
    run("produce", "acess", "y")
    assert payloads(link, keys, "acess", 1) == [b"x", b"y"]


@pytest.mark.parametrize(
    "section",
    [
        {"topics": {"orders": {"partitions": 2}}},
        {"consumers": [{"topic": "orders", "group": "bill", "handler": "shop:bill"}]},
    ],
)
def test_produce_creates_a_configured_topic(
    run: Run, file: Path, server: Server, link: Connection, keys: Keys, section: dict[str, object]
) -> None:
    """The first message creates the topic, because the configuration names it."""
    file.write_text(file.read_text() + "\n" + toml(section))
    run("produce", "orders", "x")
    assert payloads(link, keys, "orders", 2) == [b"x"]


@pytest.mark.parametrize(("answer", "code", "there"), [("n", 8, []), ("y", 0, ["orders"])])
def test_produce_on_a_terminal_confirms_a_new_topic(
    run_in_terminal: Typed, store: Store, answer: str, code: int, there: list[str]
) -> None:
    """In a terminal, `produce` asks before it creates a topic."""
    asked = "Create topic orders?"
    shown = run_in_terminal(
        "produce", "orders", "x", until=asked, keys=f"{answer}\n", code=code
    ).raw
    assert "does not exist" in shown
    assert topics.names(store) == there


def test_produce_reads_lines_typed_into_a_terminal(
    run_in_terminal: Typed, harness_at: HarnessAt, link: Connection, keys: Keys
) -> None:
    """In a terminal, `produce` reads lines until Ctrl-D."""
    harness_at(0)
    run_in_terminal("produce", "access", until="finish with Ctrl-D", keys="one\ntwo\n\x04")
    assert payloads(link, keys) == [b"one", b"two"]


# --- tail -----------------------------------------------------------------------------------------


def test_tail_since_shows_messages_from_that_time(
    run: Run, harness_at: HarnessAt, link: Connection
) -> None:
    """`tail --since` shows all messages that were written since then, with the oldest first."""
    now = server_unix_ms(link)
    for number in range(250):
        harness_at(number % 3).add(f"{now - 1_000_000 + number}-0", "payload", f"new {number}")
    every = run("tail", "access", "--since", "30m").stdout.splitlines()
    assert [line.split("  ")[2] for line in every] == [f"new {number}" for number in range(250)]
    assert run("tail", "access", "--since", "10m").stdout == ""
    assert run("tail", "access", "--since", "10m").stderr == "nothing matches\n"
    assert len(run("tail", "access", "--since", "30m", "-n", "5").stdout.splitlines()) == 5
    exact = run("tail", "access", "--since", str(now - 1_000_000 + 248)).stdout
    assert [line.split("  ")[2] for line in exact.splitlines()] == ["new 248", "new 249"]
    assert "future" in run("tail", "access", "--since", "2999-01-01", code=2).stderr
    assert "is not a valid time" in run("tail", "access", "--since", "nope", code=2).stderr


def test_tail_since_can_be_combined_with_follow(
    run_in_terminal: Typed, harness_at: HarnessAt, link: Connection
) -> None:
    """Together, --since and --follow miss no message and show none twice."""
    now = server_unix_ms(link)
    harness_at(0).add(f"{now - 5000}-0", "payload", "before")
    terminal = run_in_terminal(
        "tail", "access", "--since", "1h", "--follow", until="before", keys="\x03", code=130
    )
    assert terminal.raw.count("before") == 1


# --- moving and draining --------------------------------------------------------------------------


def test_move_and_drain_check_the_instance_equally(run: Run, harness_at: HarnessAt) -> None:
    harness_at(0).groups()
    assignment = "access/0/hits"
    refused = run("move", assignment, "web-9", code=8).stderr
    assert "web-9" in refused
    assert refused == run("drain", "web-9", code=8).stderr
    assert "INSTANCE" in run("move", assignment, code=2).stderr


# --- colors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "env", "colored"),
    [
        ((), {}, True),
        ((), {"NO_COLOR": "1"}, False),
        ((), {"TERM": "dumb"}, False),
        (("--no-color",), {}, False),
        (("--color",), {"NO_COLOR": "1"}, True),
    ],
)
def test_terminal_output_has_colors(
    run_in_terminal: Typed,
    harness_at: HarnessAt,
    options: tuple[str, ...],
    env: dict[str, str],
    colored: bool,
) -> None:
    """A terminal gets colors, unless NO_COLOR or `--no-color` is set."""
    harness_at(0)
    assert bool(ANSI_COLOR.search(run_in_terminal(*options, "topic", "list", **env).raw)) == colored
    refused = run_in_terminal(*options, "topic", "describe", "nope", code=8, **env).raw
    assert bool(ANSI_COLOR.search(refused)) == colored


@pytest.mark.parametrize("options", [(), ("--color",)])
def test_pipes_and_json_have_no_colors(
    run: Run, run_in_terminal: Typed, harness_at: HarnessAt, options: tuple[str, ...]
) -> None:
    """Pipes and JSON never have colors."""
    harness_at(0)
    assert "\x1b" not in run(*options, "topic", "list").stdout
    assert "\x1b" not in run(*options, "topic", "describe", "nope", code=8).stderr
    assert "\x1b" not in run_in_terminal(*options, "topic", "list", "--json").raw


# --- completion -----------------------------------------------------------------------------------


@pytest.fixture
def complete(file: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """A function that returns the shell's completions for the last word.

    The shell may print nothing else.
    """

    def ask(*words: str, shell: str = "bash", config: Path = file) -> list[str]:
        line = ["streamqd", "--config", str(config), *words]
        env = os.environ | {
            "_STREAMQD_COMPLETE": f"{shell}_complete",
            "COMP_WORDS": " ".join(line) if shell != "fish" else " ".join(line[:-1]),
            "COMP_CWORD": str(len(line) - 1) if shell != "fish" else line[-1],
            "PYTHONPATH": str(ROOT),
        }
        code = "from streamqd.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, timeout=60
        )
        assert not done.stderr
        lines = done.stdout.decode().strip().splitlines()
        if shell == "zsh":
            return lines[1::3]
        return [each.partition(",")[2].partition("\t")[0] for each in lines]

    return ask


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion_answers_each_shell(
    complete: Callable[..., list[str]], harness_at: HarnessAt, shell: str
) -> None:
    """In bash, zsh and fish, topics are completed by the process that the shell starts."""
    harness_at(0)
    assert complete("tail", "ac", shell=shell) == ["access"]


def test_shell_completion_completes_names(
    file: Path, harness_at: HarnessAt, link: Connection, keys: Keys
) -> None:
    """Topics, groups and instances are completed. Invalid names never reach the shell.

    The arguments of `why` are completed like those of other commands.
    """
    harness_at(0).groups()
    link.execute("HSET", keys.meta("access"), "group:hits", 3)
    link.execute("SADD", keys.registry(), "bad name", "../x", b"\xff", "audit")
    link.execute("ZADD", keys.members("default"), 1, "web-1", 2, "web\n2")
    for name in ("nightly", "a\nb"):
        link.execute("HSET", keys.schedule_index(), name, "default file access 0")
    shell = BashComplete(cli, {}, "streamqd", "_STREAMQD_COMPLETE")

    def offered(*words: str) -> list[str]:
        found = shell.get_completions(["--config", str(file), *words[:-1]], words[-1])
        return [each.value for each in found]

    assert offered("tail", "") == ["access", "audit"]
    assert offered("tail", "ac") == ["access"]
    assert offered("topic", "describe", "au") == ["audit"]
    assert offered("partitions", "access", "--group", "h") == ["hits"]
    assert offered("retry", "list", "access", "") == ["hits"]
    assert offered("group", "describe", "access", "") == ["hits"]
    assert offered("drain", "w") == ["web-1"]
    assert offered("forget", "w") == ["web-1"]
    assert offered("move", "access/0/hits", "w") == ["web-1"]
    assert offered("pause", "acc") == ["access"]
    assert offered("schedule", "show", "") == ["nightly"]
    assert offered("schedule", "resume", "nightly", "n") == ["nightly"]
    assert offered("schedule", "list", "--topic", "ac") == ["access"]
    assert offered("move", "access/1") == ["access/1/hits"]
    assert offered("why", "acc") == ["access"]
    assert offered("why", "access/1") == ["access/1", "access/1/hits"]
    assert offered("scale", "access/") == ["access/hits"]
    assert offered("prod") == ["produce"]

    # A `--config` after the command takes precedence over one before it.
    late = BashComplete(cli, {"obj": Session()}, "streamqd", "_STREAMQD_COMPLETE")
    for words in (["tail", "--config", str(file)], ["-c", "no.toml", "tail", "-c", str(file)]):
        assert [each.value for each in late.get_completions(words, "ac")] == ["access"]


def test_shell_completion_does_not_block_without_a_server(
    complete: Callable[..., list[str]], tmp_path: Path
) -> None:
    """If a server is silent or missing, completion returns nothing within its time limit."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        file = tmp_path / "silent.toml"
        file.write_text(toml({"redis": {"url": f"redis://127.0.0.1:{silent.getsockname()[1]}"}}))
        plain = time.monotonic()
        assert complete("prod", config=file) == ["produce"]
        started = time.monotonic()
        assert complete("tail", "", config=file) == []
        # Everything else takes the same time, mostly the start of Python.
        assert time.monotonic() - started < 2 * (started - plain) + 1.0 + 5.0
    assert complete("tail", "", config=file) == []
    assert complete("tail", "", config=tmp_path / "none.toml") == []
