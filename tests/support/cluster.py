"""A Redis Cluster of local processes: three masters with their replicas on loopback ports.

It is created with plain commands, without redis-cli, and fails over quickly:

    with Cluster(find_binary("valkey")) as cluster:
        cluster.master_of("stream:topic:{orders:p:0}").kill()
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from streamqd import config
from streamqd.config.topology import PORT_MAX, Address
from streamqd.errors import RedisResponseError, RedisUnavailableError
from streamqd.store.client import connect
from streamqd.store.slots import SLOTS, SlotMap, key_slot
from tests.support import tls
from tests.support.servers import ProcessServer, free_port, port_is_free
from tests.support.waiting import wait_until

NODE_TIMEOUT_MS = 800
READY_SECONDS = 30.0
BUS = 10_000


class Node(ProcessServer):
    """A node of the cluster. With `certificates`, it uses only TLS, even on the cluster bus.

    `call` sends commands to this node alone.
    """

    def __init__(self, binary: Path, certificates: Path | None, **more: str) -> None:
        self._certificates = certificates
        port, self.bus_port = _ports()
        speech = {"port": str(port)}
        if certificates is not None:
            speech = {"port": "0", "tls_cluster": "yes", **tls.options(certificates, port)}
        self._port = port
        super().__init__(
            "cluster",
            binary,
            cluster_enabled="yes",
            cluster_config_file="nodes.conf",
            cluster_node_timeout=str(NODE_TIMEOUT_MS),
            cluster_replica_validity_factor="0",
            cluster_migration_barrier="99",
            repl_diskless_sync_delay="0",
            repl_ping_replica_period="1",
            **speech,
            **more,
        )
        self.port = port
        self._link = connect(self.settings, timeout=10.0, name="test:node")
        self.id = self.call("CLUSTER", "MYID").decode()

    @property
    def settings(self) -> config.Redis:
        if self._certificates is None:
            return super().settings
        # A client that connects over TLS gets the TLS ports.
        return tls.settings(f"rediss://127.0.0.1:{self._port}", self._certificates)

    def call(self, *command: Any) -> Any:
        """Run one command on this node."""
        return self._link.execute(*command)

    def refusals(self, code: str) -> int:
        """Return how many error replies with this code the node has sent since it started."""
        for line in self.call("INFO", "errorstats").decode().splitlines():
            if line.startswith(f"errorstat_{code}:"):
                return int(line.partition("=")[2].partition(",")[0])
        return 0

    def state(self) -> dict[str, str]:
        """Return the reply to CLUSTER INFO."""
        text = self.call("CLUSTER", "INFO").decode()
        return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)

    def role(self) -> str:
        """Return `master` or `slave`."""
        found: bytes = self.call("ROLE")[0]
        return found.decode()

    def migrate(self, target: Node, *keys: str | bytes) -> None:
        """Move keys to another node, as a resharding tool does."""
        self.call("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)

    def kill(self) -> None:
        self._link.close()
        super().kill()

    def close(self) -> None:
        self._link.close()
        super().close()


class Cluster:
    """The nodes of a cluster.

    `masters` and `replicas` list the roles at the start, which a failover changes.
    """

    def __init__(
        self,
        binary: Path,
        *,
        masters: int = 3,
        replicas: int = 1,
        certificates: Path | None = None,
        **more: str,
    ) -> None:
        self._scheme = "redis" if certificates is None else "rediss"
        self.nodes: list[Node] = []
        try:
            for _ in range(masters * (1 + replicas)):
                self.nodes.append(Node(binary, certificates, **more))
            self.masters, self.replicas = self.nodes[:masters], self.nodes[masters:]
            self._join()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """A URL with two of the nodes, which are enough to find the others."""
        first, last = self.masters[0], (self.replicas or self.masters)[-1]
        return f"{self._scheme}+cluster://127.0.0.1:{first.port},127.0.0.1:{last.port}"

    def master_for_key(self, key: str) -> Node:
        """Return the running node that currently serves the slot of a key."""
        address = self.map().master_for_slot(key_slot(key))
        assert address is not None
        return next(node for node in self.nodes if node.port == address.port)

    def replica_for_key(self, master: Node) -> Node:
        """Return the current replica of a master."""
        for node in self.nodes:
            if node.running and node is not master:
                role, *facts = node.call("ROLE")
                if role == b"slave" and facts[1] == master.port:
                    return node
        raise AssertionError("it has no replica")

    def map(self) -> SlotMap:
        """Return the slot map that the first running node reports."""
        node = next(node for node in self.nodes if node.running)
        return SlotMap.parse(node.call("CLUSTER", "SLOTS"), _address(node))

    def wait_ok(self, timeout: float = READY_SECONDS) -> None:
        """Wait until all running nodes agree that all slots are served, and on who serves them."""
        wait_until(self._agree, timeout=timeout, what="the cluster is well", every=0.05)

    def wait_promoted(self, node: Node, timeout: float = READY_SECONDS) -> None:
        """Wait until a replica has become master and all nodes know about it."""
        wait_until(
            lambda: node.role() == "master" and self._agree(),
            timeout=timeout,
            what="a replica is promoted",
            every=0.05,
        )

    def flush(self) -> None:
        """Empty all masters."""
        for node in self.nodes:
            if node.running and node.role() == "master":
                node.call("FLUSHALL")

    def all_keys(self) -> list[str]:
        """Return all keys of all masters."""
        masters = [node for node in self.nodes if node.running and node.role() == "master"]
        return [key.decode() for node in masters for key in node.call("KEYS", "*")]

    def begin_move(self, key: str) -> tuple[Node, Node]:
        """Start to move the slot of a key. Both nodes know about it, but no key has moved yet."""
        source = self.master_for_key(key)
        others = (node for node in self.nodes if node is not source and node.role() == "master")
        target = next(others)
        target.call("CLUSTER", "SETSLOT", key_slot(key), "IMPORTING", source.id)
        source.call("CLUSTER", "SETSLOT", key_slot(key), "MIGRATING", target.id)
        return source, target

    def end_move(self, key: str, target: Node) -> None:
        """Move the remaining keys, and assign the slot to the new node."""
        source, slot = self.master_for_key(key), key_slot(key)
        while keys := source.call("CLUSTER", "GETKEYSINSLOT", slot, 100):
            source.migrate(target, *keys)
        for node in (target, source):
            node.call("CLUSTER", "SETSLOT", slot, "NODE", target.id)

    def close(self) -> None:
        """Stop all nodes."""
        for node in self.nodes:
            node.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _join(self) -> None:
        first = self.nodes[0]
        for number, node in enumerate(self.nodes, 1):
            node.call("CLUSTER", "SET-CONFIG-EPOCH", number)
            if node is not first:
                port, bus = str(first.port), first.bus_port
                node.call("CLUSTER", "MEET", "127.0.0.1", port, bus)
        count = len(self.masters)
        for number, node in enumerate(self.masters):
            slots = range(SLOTS * number // count, SLOTS * (number + 1) // count)
            node.call("CLUSTER", "ADDSLOTS", *slots)
        wait_until(self._all_known, timeout=READY_SECONDS, what="the nodes have met", every=0.02)
        for number, node in enumerate(self.replicas):
            node.call("CLUSTER", "REPLICATE", self.masters[number % count].id)
        self.wait_ok()
        wait_until(self._replicate, timeout=READY_SECONDS, what="the replicas follow", every=0.02)

    def _all_known(self) -> bool:
        return all(
            node.state()["cluster_known_nodes"] == str(len(self.nodes)) for node in self.nodes
        )

    def _replicate(self) -> bool:
        return all(
            b"master_link_status:up" in node.call("INFO", "replication") for node in self.replicas
        )

    def _agree(self) -> bool:
        living = [node for node in self.nodes if node.running]
        try:
            maps = {
                tuple(SlotMap.parse(node.call("CLUSTER", "SLOTS"), _address(node)).ranges)
                for node in living
            }
            well = all(node.state()["cluster_state"] == "ok" for node in living)
        except (RedisUnavailableError, RedisResponseError):
            return False
        ports = {node.port for node in living}
        return well and len(maps) == 1 and {each[2].port for each in next(iter(maps))} <= ports


def _ports() -> tuple[int, int]:
    """Return a free port together with the port of the cluster bus.

    Before version 7, the bus port has a fixed offset from the other port.
    """
    while True:
        port = free_port()
        bus = port + BUS
        if bus <= PORT_MAX and port_is_free(bus):
            return port, bus


def _address(node: Node) -> Address:
    return Address("127.0.0.1", node.port)
