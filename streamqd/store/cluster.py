"""The route to a whole Redis Cluster, which sends each command to the node that serves its key.

The route has a `Node` for each master that it needs. An exchange first writes to all nodes and then
reads from all of them, so it takes only as long as the slowest node. All nodes share one time
limit. If a node redirects a command (MOVED, ASK), the route sends it to the right node. It returns
all other errors to the caller, as a single node does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from streamqd.errors import RedisResponseError, RedisUnavailableError
from streamqd.store.discovery import LEAST_SECONDS, NOT_EXECUTED, TopologyDiscovery, read_slot_map
from streamqd.store.endpoint import endpoint_at
from streamqd.store.node import NEVER, ConnectionOptions, Key, Node, check_process, fixed_finder
from streamqd.store.replies import merge_missing, require_all
from streamqd.store.slots import SlotMap, key_slot, parse_redirect, routing_key

if TYPE_CHECKING:
    from streamqd.config.topology import Address

# How often a command is redirected in one exchange before the route gives up on it. More redirects
# than this mean that the nodes disagree about which of them serves the slot.
REDIRECTS_MAX = 4
_MAP_REFRESH_SECONDS = 0.2  # shortest time between two reads of the slot map


@dataclass
class _Command:
    """A command in progress, with its target and the last reply to it."""

    command: Sequence[Any]
    slot: int | None  # None if any node may run the command
    address: Address | None = None  # the target of the last redirect, if there was one
    asking: bool = False
    bound: bool = False  # True if it is part of a transaction, whose commands are not redirected
    reply: Any = None


@dataclass
class _NodeBatch:
    """The commands that are sent to one node in one write."""

    requests: list[_Command] = field(default_factory=list)

    def commands(self) -> list[Sequence[Any]]:
        """Return the commands to send, with ASKING before each command that needs it."""
        found: list[Sequence[Any]] = []
        for request in self.requests:
            if request.asking:
                found.append(("ASKING",))
            found.append(request.command)
        return found

    def assign_replies(self, replies: Sequence[Any]) -> None:
        """Store the reply to each command. Replies to ASKING are skipped."""
        at = 0
        for request in self.requests:
            at += request.asking
            request.reply = replies[at]
            at += 1

    def fail(self, error: RedisUnavailableError) -> None:
        """Store the error as the reply to every command."""
        for request in self.requests:
            request.reply = error


class Cluster:
    """The route to all masters of a cluster, with the same interface as a `Node`.

    The connection to a master is opened when a command first needs it.
    """

    def __init__(self, options: ConnectionOptions, discovery: TopologyDiscovery) -> None:
        """Prepare the route without connecting."""
        self._options = options
        self._discovery = discovery
        self._nodes: dict[Address, Node] = {}
        self._map: SlotMap | None = None
        self._stale = True
        self._map_read_at = 0.0
        self._silent: set[Address] = set()  # nodes that did not answer the last attempt
        self._pid = os.getpid()
        self._end = NEVER

    # --- the interface of a route: see `Connection` ---

    def exchange(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Run commands as `exchange_each` does, but require all replies.

        Raises RedisUnavailableError if any reply is missing.
        """
        return require_all(self.exchange_each(commands))

    def exchange_each(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Run each command on the node that serves its key.

        If a command gets no answer, or if its node cannot execute it now, its reply is a
        RedisUnavailableError. Raises RedisUnavailableError if this is so for all commands.
        """
        check_process(self._pid, self._options.name)
        requests = self._route(commands)
        waiting = requests
        for _ in range(1 + REDIRECTS_MAX):
            self._round(waiting)
            waiting = [each for each in waiting if self._follow_redirect(each)]
            if not waiting:
                break
        for each in requests:
            if isinstance(each.reply, RedisResponseError) and each.reply.kind in NOT_EXECUTED:
                self._stale = True
                each.reply = RedisUnavailableError(str(each.reply), sent=False)
        replies = [each.reply for each in requests]
        if all(isinstance(reply, RedisUnavailableError) for reply in replies):
            raise merge_missing(replies)
        return replies

    def masters(self) -> list[Node]:
        # Read the map again, because it may be outdated. The route learns about a new or replaced
        # master only when that node's slots are used and a command is redirected.
        check_process(self._pid, self._options.name)
        self._stale = True
        self._read_slot_map()
        assert self._map is not None
        found = [self._node(address) for address in self._map.masters]
        for node in found:
            node.set_deadline(self._end)
        return found

    def node_for_key(self, key: str) -> str:
        master = None if self._map is None else self._map.master_for_slot(key_slot(key))
        return "" if master is None else str(master)

    def group_by_node(self, keys: Sequence[Key]) -> list[list[Key]]:
        slots: dict[int, list[Key]] = {}
        for key in keys:
            slots.setdefault(key_slot(key), []).append(key)
        return list(slots.values())

    @property
    def node(self) -> Node:
        raise RuntimeError("a connection to a cluster has no single socket; connect with a key")

    @property
    def connected(self) -> bool:
        return any(node.connected for node in self._nodes.values())

    @property
    def address(self) -> str:
        return str(self._discovery.where)

    def close(self) -> None:
        for node in self._nodes.values():
            node.close()
        if os.getpid() != self._pid:
            self.detach()

    def detach(self) -> None:
        for node in self._nodes.values():
            node.detach()
        self._nodes.clear()
        self._stale = True
        self._pid = os.getpid()

    def disable(self) -> None:
        for node in self._nodes.values():
            node.disable()

    def set_deadline(self, end: float) -> None:
        self._end = end

    def open(self) -> None:
        """Read the slot map and connect to one node, unless a node is already connected."""
        check_process(self._pid, self._options.name)
        if not self.connected:
            self._read_slot_map()
            node = self._node(self._any_master())
            node.set_deadline(self._end)
            node.open()

    # --- one exchange ---

    def _route(self, commands: Iterable[Sequence[Any]]) -> list[_Command]:
        requests = []
        for command in commands:
            key = routing_key(command)
            requests.append(_Command(command, None if key is None else key_slot(key)))
        if any(each.command[0] == "MULTI" for each in requests):
            # All commands of a transaction must go to the same node.
            slot = next((each.slot for each in requests if each.slot is not None), None)
            for each in requests:
                each.slot, each.bound = slot, True
        return requests

    def _round(self, requests: Sequence[_Command]) -> None:
        """Send each command to its node according to the current map, and read the replies."""
        deadline = min(time.monotonic() + self._options.timeout, self._end)
        try:
            self._read_slot_map()
        except RedisUnavailableError as error:
            _NodeBatch(list(requests)).fail(error)
            return
        loads: dict[Address, _NodeBatch] = {}
        for each in requests:
            address = each.address or self._find_master(each)
            if address is None:
                each.reply = RedisUnavailableError(f"no node serves slot {each.slot}", sent=False)
                self._stale = True
            else:
                loads.setdefault(address, _NodeBatch()).requests.append(each)
        self._exchange(loads, deadline)

    def _exchange(self, loads: dict[Address, _NodeBatch], deadline: float) -> None:
        """Write to all nodes and then read from all, starting with those most likely to answer."""
        order = sorted(loads, key=lambda at: (not self._node(at).connected, at in self._silent))
        posted: list[Address] = []
        try:
            for address in order:
                node = self._node(address)
                now = time.monotonic()
                if now >= self._end:  # the node was not asked, so it does not count as silent
                    loads[address].fail(RedisUnavailableError(f"no time for {address}", sent=False))
                    continue
                end = max(deadline, now + LEAST_SECONDS)
                if self._end < NEVER:
                    # Connecting to a node may use only half of the remaining time, so that some is
                    # left for the other nodes if this one hangs.
                    end = self._end if node.connected else now + (self._end - now) / 2
                node.set_deadline(end)
                try:
                    node.post(loads[address].commands())
                    posted.append(address)
                except RedisUnavailableError as error:
                    self._record_failure(address, loads[address], error)
            for address in list(posted):
                load, node = loads[address], self._node(address)
                try:
                    load.assign_replies(node.collect(len(load.commands())))
                    self._silent.discard(address)
                except RedisUnavailableError as error:
                    self._record_failure(address, load, error)
                posted.remove(address)
        except BaseException:
            for address in posted:
                self._node(address).close()
            raise

    def _record_failure(
        self, address: Address, load: _NodeBatch, error: RedisUnavailableError
    ) -> None:
        load.fail(error)
        self._silent.add(address)
        self._discovery.avoid(address)
        self._stale = True

    def _follow_redirect(self, request: _Command) -> bool:
        """If the reply redirects the command, set its new target and return True."""
        reply = request.reply
        if not isinstance(reply, RedisResponseError) or request.slot is None or request.bound:
            return False
        assert self._map is not None
        asked = request.address or self._map.master_for_slot(request.slot)
        redirect = None if asked is None else parse_redirect(str(reply), asked)
        if redirect is None:
            return False
        request.address, request.asking = redirect
        if not redirect.asking:
            self._map = self._map.with_redirect(request.slot, redirect.address)
            self._discovery.prefer(redirect.address)
            self._stale = True
        return True

    # --- the map ---

    def _read_slot_map(self) -> None:
        """Read the slot map if it is unknown or outdated."""
        now = time.monotonic()
        if self._map is not None and (
            not self._stale or now - self._map_read_at < _MAP_REFRESH_SECONDS
        ):
            return
        self._map_read_at = now
        try:
            self._map = read_slot_map(self._discovery, self._end)
        except RedisUnavailableError:
            if self._map is None:
                raise
            return  # keep the old map, because its nodes may still answer
        self._stale = False
        gone = self._nodes.keys() - {*self._map.masters}
        for address in gone:
            self._nodes.pop(address).close()

    def _find_master(self, request: _Command) -> Address | None:
        assert self._map is not None
        return (
            self._any_master() if request.slot is None else self._map.master_for_slot(request.slot)
        )

    def _any_master(self) -> Address:
        """Return a master for a command that any node may run, preferably a connected one."""
        assert self._map is not None
        masters = self._map.masters
        answering = [each for each in masters if each not in self._silent]
        connected = [each for each in answering if self._node(each).connected]
        found = next(iter(connected or answering or masters), None)
        if found is None:
            raise RedisUnavailableError(
                f"{self._discovery.where}: no node serves any slot", sent=False
            )
        return found

    def _node(self, address: Address) -> Node:
        node = self._nodes.get(address)
        if node is None:
            endpoint = endpoint_at(self._options.settings, self._discovery.where, address)
            node = self._nodes[address] = Node(self._options, fixed_finder(endpoint))
        return node
