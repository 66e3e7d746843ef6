"""A master, its replicas and three sentinels, as local processes on loopback ports.

with Sentinels(find_binary("valkey")) as sentinels:
    old = sentinels.master
    old.kill()
    new = sentinels.wait_failover(old)
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from streamqd import config
from streamqd.errors import RedisResponseError, RedisUnavailableError
from streamqd.store.client import connect
from tests.support import tls
from tests.support.servers import ProcessServer, die_with_parent, free_port
from tests.support.waiting import wait_until

NAME = "shop"
DOWN_AFTER_MS = 600
READY_SECONDS = 75.0  # a sentinel whose clock was late does nothing for 30 s (TILT)


class Data(ProcessServer):
    """A data server. With `certificates`, it also accepts TLS connections.

    `call` sends commands to this server alone.
    """

    def __init__(self, binary: Path, certificates: Path | None = None, **more: str) -> None:
        port = free_port()
        if certificates is not None:
            more = {"tls_replication": "yes", **tls.options(certificates, port), **more}
        super().__init__(
            "sentinel",
            binary,
            tcp=True,
            repl_diskless_sync_delay="0",
            repl_ping_replica_period="1",
            replica_announce_ip="127.0.0.1",
            **more,
        )
        if certificates is not None:
            self.port = port
        self._link = connect(self.settings, timeout=10.0, name="test:data")

    def call(self, *command: Any) -> Any:
        """Run one command on this server."""
        return self._link.execute(*command)

    def role(self) -> str:
        """Return `master` or `slave`."""
        found: bytes = self.call("ROLE")[0]
        return found.decode()

    def follows(self) -> bool:
        """Return True if the server is a replica that has copied everything."""
        return b"master_link_status:up" in self.call("INFO", "replication")

    def kill(self) -> None:
        self._link.close()
        super().kill()

    def close(self) -> None:
        self._link.close()
        super().close()


class Sentinel:
    """A sentinel process. Its clients need the `password` or `certificates`, if any are given."""

    def __init__(self, binary: Path, password: str = "", certificates: Path | None = None) -> None:
        self._binary = binary
        self._password = password
        self._certificates = certificates
        self.folder = Path(tempfile.mkdtemp(prefix="sqs-"))
        self.port = free_port()
        self.id = secrets.token_hex(20)
        login = f":{password}@" if password else ""
        url = f"unix://{login}{quote(str(self.folder / 'sentinel.sock'))}"
        self._link = connect(config.Redis(url=url), timeout=10.0, name="test:sentinel")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, servers: Sequence[Data], sentinels: Sequence[Sentinel]) -> None:
        """Start the sentinel, which knows all the others from the start."""
        master, *replicas = servers
        path = self.folder / "sentinel.conf"
        lines = (
            *self._speech(),
            "bind 127.0.0.1",
            f"unixsocket {self.folder}/sentinel.sock",
            f"dir {self.folder}",
            f"logfile {self.folder}/sentinel.log",
            "sentinel announce-ip 127.0.0.1",
            f"sentinel myid {self.id}",
            f"sentinel monitor {NAME} 127.0.0.1 {master.port} 2",
            f"sentinel down-after-milliseconds {NAME} {DOWN_AFTER_MS}",
            f"sentinel failover-timeout {NAME} 3000",
            f"sentinel parallel-syncs {NAME} 2",
            *(f"sentinel known-replica {NAME} 127.0.0.1 {each.port}" for each in replicas),
            *(
                f"sentinel known-sentinel {NAME} 127.0.0.1 {each.port} {each.id}"
                for each in sentinels
                if each is not self
            ),
        )
        path.write_text("\n".join(lines) + "\n")
        self._process = subprocess.Popen(
            [str(self._binary), str(path), "--sentinel"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent(os.getpid()),
        )

    def _speech(self) -> list[str]:
        lines = []
        if self._password:
            lines += [f"requirepass {self._password}", f"sentinel sentinel-pass {self._password}"]
        if self._certificates is None:
            return [*lines, f"port {self.port}"]
        words = {"port": "0", "tls_replication": "yes"}
        words |= tls.options(self._certificates, self.port)
        return lines + [f"{name.replace('_', '-')} {value}" for name, value in words.items()]

    def call(self, *command: Any) -> Any:
        """Run one command on this sentinel."""
        return self._link.execute(*command)

    def master_port(self) -> int:
        """Return the port of the master according to this sentinel, or 0 if it does not answer."""
        try:
            found = self.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME)
        except (RedisUnavailableError, RedisResponseError):
            return 0
        return 0 if found is None else int(found[1])

    def facts(self) -> dict[str, str]:
        """Return the reply to SENTINEL MASTER, or an empty result if there is no answer."""
        try:
            flat = [part.decode() for part in self.call("SENTINEL", "MASTER", NAME)]
        except (RedisUnavailableError, RedisResponseError):
            return {}
        return dict(zip(flat[::2], flat[1::2], strict=True))

    def close(self) -> None:
        """Stop the sentinel."""
        self._link.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)


class Sentinels:
    """All processes. `master` is the initial master, while a failover promotes another server.

    `more` contains settings of the servers. The sentinels require `password`.
    """

    def __init__(
        self,
        binary: Path,
        *,
        replicas: int = 1,
        sentinels: int = 3,
        password: str = "",
        certificates: Path | None = None,
        **more: str,
    ) -> None:
        self._scheme = "redis" if certificates is None else "rediss"
        self.servers: list[Data] = []
        self.sentinels: list[Sentinel] = []
        try:
            self.master = Data(binary, certificates, **more)
            self.servers.append(self.master)
            for _ in range(replicas):
                self.servers.append(Data(binary, certificates, **more))
                self.servers[-1].call("REPLICAOF", "127.0.0.1", self.master.port)
            wait_until(
                lambda: all(each.follows() for each in self.servers[1:]),
                timeout=READY_SECONDS,
                what="the replicas follow",
                every=0.02,
            )
            for _ in range(sentinels):
                self.sentinels.append(Sentinel(binary, password, certificates))
            for each in self.sentinels:
                each.start(self.servers, self.sentinels)
            self.wait_ready(replicas)
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """A URL with all sentinels."""
        hosts = ",".join(f"127.0.0.1:{each.port}" for each in self.sentinels)
        return f"{self._scheme}+sentinel://{hosts}/{NAME}"

    def wait_ready(self, replicas: int) -> None:
        """Wait until the sentinels know each other and the replicas, so that they can fail over."""
        others = str(len(self.sentinels) - 1)
        wanted = {"num-other-sentinels": others, "num-slaves": str(replicas), "flags": "master"}
        wait_until(
            lambda: all(wanted.items() <= each.facts().items() for each in self.sentinels),
            timeout=READY_SECONDS,
            what="the sentinels know all",
            every=0.05,
        )

    def wait_failover(self, old: Data) -> Data:
        """Wait until all sentinels name the same new master, and it has that role. Return it."""

        def promoted() -> Data | None:
            ports = {each.master_port() for each in self.sentinels}
            found = next((each for each in self.servers if {each.port} == ports), None)
            good = found is not None and found is not old and found.role() == "master"
            return found if good else None

        wait_until(promoted, timeout=READY_SECONDS, what="a replica is promoted", every=0.05)
        found = promoted()
        assert found is not None
        return found

    def close(self) -> None:
        """Stop all processes."""
        for each in self.sentinels:
            each.close()
        for server in self.servers:
            server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()
