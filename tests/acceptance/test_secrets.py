"""A password comes from a file, a credential or the environment, and leaks nowhere else."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from streamqd.cli import cli
from streamqd.store.client import Connection
from tests.support import users
from tests.support.daemon import Daemon
from tests.support.servers import ProcessServer, Server

NewDaemon = Callable[..., Daemon]

USER, PASSWORD = "night-shift", "s3cret-0f-the-test"

# This is the environment as user code sees it, and as the programs see it that user code starts.
SPY = """
import json, os, subprocess
from pathlib import Path
from streamqd import Message

def obey(message: Message) -> None:
    own = {name: text for name, text in os.environ.items() if name.startswith("STREAMQ")}
    child = subprocess.run(["/usr/bin/env"], capture_output=True, text=True).stdout
    kernel = Path("/proc/self/environ").read_bytes().decode("latin-1")
    Path("spied").write_text(json.dumps([own, child, kernel]))
    raise RuntimeError("cannot reach redis://night-shift:s3cret-0f-the-test@127.0.0.1:1/0")
"""


@pytest.fixture
def login(process_server: ProcessServer, link: Connection) -> Iterator[str]:
    """The URL of a server with a password-protected user that has a daemon's permissions."""
    rules = users.read_line("daemon").split()[2:]
    link.execute("ACL", "SETUSER", USER, *rules, f">{PASSWORD}")
    yield f"unix://{USER}:{PASSWORD}@{process_server.socket_path}"
    link.execute("ACL", "DELUSER", USER)


def collect_output(daemon: Daemon) -> str:
    """Return everything that a daemon wrote, and its processes' environments and command lines."""
    texts = [path.read_text(errors="replace") for path in daemon.folder.glob("*.log")]
    for one in daemon.session():
        paths = [Path(f"/proc/{one.pid}/{name}") for name in ("environ", "cmdline")]
        texts += [path.read_bytes().decode("latin-1") for path in paths]
    for number in range(daemon.partitions):
        letters = daemon.link.execute("XRANGE", daemon.keys.dlq("orders", number), "-", "+")
        texts.append(repr(letters))
    texts.append(repr(daemon.link.execute("GET", daemon.keys.instance("default", "one"))))
    return "\n".join(texts)


def test_environment_password_is_not_inherited_by_workers(
    new_daemon: NewDaemon, login: str, tmp_path: Path
) -> None:
    daemon = new_daemon(code=SPY, consumer={"max_attempts": 1})
    daemon.environment["STREAMQ_REDIS__URL"] = login
    daemon.environment["STREAMQ_REDIS__USERNAME"] = ""
    with daemon:
        daemon.send(["go"])
        daemon.wait_for(daemon.letters, what="it is dead")
        own, child, kernel = json.loads((tmp_path / "spied").read_text())

        # The address stays in the environment. A client that uses it gets an error about a missing
        # password.
        assert own["STREAMQ_REDIS__URL"] == login.replace(f":{PASSWORD}@", "@")
        assert PASSWORD not in child
        assert PASSWORD not in kernel
        (letter,) = daemon.letters()
        assert letter["errorMessage"] == "cannot reach redis://night-shift:***@127.0.0.1:1/0"
        assert PASSWORD not in collect_output(daemon)
        (warned,) = [
            each["about"] for each in daemon.events("config.warning") if "STREAMQ" in each["about"]
        ]
        assert "use redis.password_file" in warned


@pytest.mark.parametrize("way", ["file", "credential"])
def test_password_from_a_file_appears_nowhere_else(
    new_daemon: NewDaemon, server: Server, login: str, tmp_path: Path, way: str
) -> None:
    daemon = new_daemon(code=SPY, consumer={"max_attempts": 1})
    # If both exist, the credential of the service manager takes precedence.
    folder = tmp_path / "credentials"
    folder.mkdir()
    for path, text in (
        (tmp_path / "password", PASSWORD if way == "file" else "an old one"),
        (folder / "redis-password", PASSWORD + "\n"),
    ):
        path.write_text(text)
        path.chmod(0o600)
    if way == "credential":
        daemon.environment["CREDENTIALS_DIRECTORY"] = str(folder)
    daemon.environment["STREAMQ_REDIS__USERNAME"] = USER
    daemon.write_config(redis={"url": server.url, "username": USER, "password_file": "password"})
    with daemon:
        daemon.link.execute("XADD", daemon.keys.stream("orders", 0), "*", "payload", "go")
        daemon.wait_for(daemon.letters, what="it is dead")
        assert PASSWORD not in "".join(json.loads((tmp_path / "spied").read_text())[1:])
        assert PASSWORD not in collect_output(daemon)


def test_config_show_masks_the_password(server: Server, login: str, tmp_path: Path) -> None:
    file = tmp_path / "streamq.toml"
    file.write_text(f'[redis]\nurl = "{login}"\n')
    file.chmod(0o600)
    for more in ((), ("--json",)):
        shown = CliRunner().invoke(cli, ["--config", str(file), "config", "show", *more])
        assert shown.exit_code == 0, shown.output
        assert PASSWORD not in shown.output
        assert f"{USER}:***@" in shown.output
    file.chmod(0o644)
    for verb in ("status", "check", "config show"):
        refused = CliRunner().invoke(cli, ["--config", str(file), *verb.split()])
        assert refused.exit_code == 3
        assert PASSWORD not in refused.output
        assert "chmod 600" in refused.output


def test_wrong_password_is_not_printed(new_daemon: NewDaemon, server: Server, login: str) -> None:
    daemon = new_daemon()
    wrong = login.replace(PASSWORD, "n0t-the-secret")
    daemon.environment["STREAMQ_REDIS__URL"] = wrong
    daemon.environment["STREAMQ_REDIS__USERNAME"] = ""
    daemon.start()
    assert daemon.wait() == 4
    assert "n0t-the-secret" not in daemon.tail(400)
    assert "WRONGPASS" in daemon.tail()
    assert os.environ.get("STREAMQ_REDIS__URL") is None
