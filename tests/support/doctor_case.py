"""The subject of the tests of `streamqd doctor`: a healthy system, and the doctor's report on it.

The system is created with the functions that producers and daemons use. After breaking something, a
test runs only the check concerned. This proves that the check itself reads everything that it
needs. The doctor must leave every key unchanged.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from streamqd import config
from streamqd.cli import cli
from streamqd.model import Assignment, Lease
from streamqd.registration import ensure_topics
from streamqd.store import leases, members
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.contract.harness import Harness

TOPIC, GROUP, INSTANCE = "access", "hits", "one"
PARTITIONS = 2
TTL = 60.0

_CONFIG = """\
[redis]
url = "{url}"
{redis}
[daemon]
instance = "one"
state_dir = "./var"
lease_ttl = "60s"
{daemon}
[topics.access]
partitions = {partitions}
{topic}
[[consumers]]
topic = "access"
group = "hits"
handler = "work:handle"
"""


class DoctorCase:
    """A folder with a configuration, and the server that the configuration names."""

    def __init__(self, folder: Path, url: str, link: Connection) -> None:
        self.folder, self.url, self.link = folder, url, link
        self.keys = Keys()
        self.harness = Harness(link, self.keys, Assignment(TOPIC, 0, GROUP))
        self.do = link.execute
        self.write()

    @property
    def store(self) -> Store:
        return Store(self.link, self.keys)

    def write(self, **lines: str) -> None:
        """Write the configuration. `redis`, `daemon` and `topic` are lines of these sections."""
        told = {"redis": "", "daemon": "", "topic": "", "partitions": str(PARTITIONS), **lines}
        self.path = self.folder / "streamq.toml"
        self.path.write_text(_CONFIG.format(url=self.url, **told))
        self.path.chmod(0o600)
        (self.folder / "var").mkdir(exist_ok=True)

    # --- the system ---

    def settle_in(self) -> None:
        """Write a daemon's data: topic and groups, its heartbeat, its leases and its summary."""
        ensure_topics(self.link, config.load(self.path))
        self.heartbeat()
        for number in range(PARTITIONS):
            call = leases.acquire(
                self.keys, Lease(Assignment(TOPIC, number, GROUP), f"t{number}", 0), TTL, INSTANCE
            )
            assert self.link.run(call).word == "OK"
        self.publish()

    def heartbeat(self, name: str = INSTANCE, nonce: str = "n1", **info: object) -> None:
        """Write the heartbeat of an instance that started long ago."""
        told = {"offers": [[TOPIC, GROUP]], "host": "web-1", "pid": 7, "started": 1.0, **info}
        reply = self.link.run(members.heartbeat(self.keys, "default", name, nonce, told, TTL))
        assert reply.word == "OK"

    def publish(self, name: str = INSTANCE, **changed: object) -> None:
        """Write a summary, as an instance's housekeeper does."""
        told = {
            "instance": name,
            "host": "web-1",
            "pid": 7,
            "at_unix_ms": self.harness.now_unix_ms(),
            "redis_up": True,
            "assignments": [],
            **changed,
        }
        self.do("SET", self.keys.instance("default", name), json.dumps(told))

    def ago(self, seconds: float) -> int:
        """Return the server's time of a number of seconds ago, in unix milliseconds."""
        return self.harness.now_unix_ms() - round(seconds * 1000)

    # --- the doctor ---

    def run(self, *args: str, code: int | None = None) -> dict[str, Any]:
        """Run `streamqd doctor --json`, and assert that it leaves the keyspace unchanged."""
        before = self.harness.dump()
        result = CliRunner().invoke(cli, ["--config", str(self.path), "doctor", "--json", *args])
        assert "Traceback" not in result.output
        assert code in (None, result.exit_code), result.output
        assert self.harness.dump() == before, "the doctor has written something"
        report: dict[str, Any] = json.loads(result.stdout)
        assert result.exit_code == (0 if report["ok"] else 1)
        return report

    def finding(self, check: str, *args: str) -> dict[str, Any]:
        """Run one check, and return its only finding."""
        report = self.run("--only", check, *args)
        assert report["checks"] == [check]
        assert report["unseen"] == []
        [found] = report["findings"]
        assert found["check"] == check
        assert found["text"]
        assert found["evidence"]
        assert "`" in found["fix"], "no exact command"
        return dict(found)

    def silent(self, check: str, *args: str) -> None:
        """Assert that one check finds nothing."""
        assert self.run("--only", check, *args, code=0)["findings"] == []
