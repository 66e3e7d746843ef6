"""Find the node to connect to by asking sentinels, or the nodes of a cluster for their slot map.

Discovery runs each time a connection is opened, because the previous master may have been stopped,
demoted or cut off from the network.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from streamqd.config.topology import Address
from streamqd.errors import RedisResponseError, RedisUnavailableError, RefusalKind
from streamqd.store.endpoint import Endpoint, endpoint_at
from streamqd.store.idle_probe import Attempts
from streamqd.store.node import ConnectionOptions, Finder, Node, fixed_finder
from streamqd.store.replies import check_replies
from streamqd.store.slots import SlotMap, key_slot, parse_redirect
from streamqd.store.transport import Transport, pack

if TYPE_CHECKING:
    from streamqd import config
    from streamqd.config.topology import Topology

# These replies mean that the node did not execute the command and cannot do so now. Another node
# may be able to execute it, or the same node may be able to do so later.
NOT_EXECUTED = frozenset({RefusalKind.NOT_READY, RefusalKind.MOVED, RefusalKind.REPLICA})
LEAST_SECONDS = 0.05  # minimum time for each node, even if other nodes have used up the time limit
_T = TypeVar("_T")
_HELLO = pack(("HELLO", "2"))


class TopologyDiscovery:
    """Asks the known nodes in turn until one answers, and remembers which one to ask first.

    One search takes no longer than `connect_timeout` or `timeout` seconds, whichever is shorter.
    """

    def __init__(
        self,
        options: ConnectionOptions,
        where: Topology,
        endpoint: Callable[[config.Redis, Topology, Address], Endpoint],
    ) -> None:
        """Prepare a discovery without asking any node yet.

        `endpoint` returns the endpoint of the node at an address. It is `sentinel_at` for
        sentinels and `endpoint_at` for data servers, because these have different logins.
        """
        self.settings = options.settings
        self.where = where
        self._options = replace(options, name="streamqd:where", probe_after=None)
        self._timeout = min(options.timeout, options.settings.connect_timeout)
        self._endpoint = endpoint
        self._order = list(where.addresses)
        # `Attempts` gives up early on a node that is slow to answer. Use it only if the connection
        # does the same (`probe_after`). Otherwise, a node may use its whole share of the time.
        self._attempts = None if options.probe_after is None else Attempts()

    def prefer(self, address: Address) -> None:
        """Ask this node first from now on, because it answered or another node named it."""
        self._order = [address, *(each for each in self._order if each != address)]

    def avoid(self, address: Address) -> None:
        """Ask this node last from now on, because it did not answer."""
        if address in self._order:
            self._order = [*(each for each in self._order if each != address), address]

    def add(self, addresses: Sequence[Address]) -> None:
        """From now on, ask only these nodes and the configured ones.

        Nodes that were already known keep their place in the order, and new ones are added at the
        end.
        """
        kept = {*addresses, *self.where.addresses}
        new = [each for each in addresses if each not in self._order]
        self._order = [each for each in self._order if each in kept] + new

    def ask(
        self, command: Sequence[Any], read: Callable[[Any, Address], _T | None], end: float
    ) -> _T:
        """Send a command to one node after another until one gives a usable answer.

        `read` is called with each reply and the address of the node that sent it. If it returns
        None, this node does not know the answer, so the next one is asked. Any other result is
        returned to the caller. No node is asked after `end` (monotonic). Raises
        RedisUnavailableError with `sent=False` if there is no usable answer.
        """
        failures: list[str] = []
        for address, seconds in self._time_slices(end):
            endpoint = self._endpoint(self.settings, self.where, address)
            node = Node(replace(self._options, timeout=seconds), fixed_finder(endpoint))
            started = time.monotonic()
            node.set_deadline(started + seconds)
            try:
                [reply] = check_replies(node.exchange((command,)))
                found = read(reply, address)
            except (RedisUnavailableError, RedisResponseError) as error:
                failures.append(str(error))
                self.avoid(address)
                continue
            finally:
                node.close()
                if self._attempts is not None:
                    self._attempts.record(time.monotonic() - started)
            if found is not None:
                self.prefer(address)
                return found
            failures.append(f"{address} has no answer")
        reasons = "; ".join(failures) or "no time was left"
        raise RedisUnavailableError(f"{self.where}: {reasons}", sent=False)

    def _time_slices(self, end: float) -> Iterator[tuple[Address, float]]:
        """Yield each node with its own time limit, so that one node cannot use up all the time."""
        deadline = min(time.monotonic() + self._timeout, end)
        order = list(self._order)
        for number, address in enumerate(order):
            now = time.monotonic()
            if now >= end:
                return
            left = deadline - now
            share = left / 2 if number + 1 < len(order) else left
            if self._attempts is not None:
                share = min(share, self._attempts.limit())
            yield address, min(max(LEAST_SECONDS, share), end - now)


def master_finder(discovery: TopologyDiscovery) -> Finder:
    """Return a finder that asks the sentinels for the address of the master.

    The server at this address is used only if it reports that it is a master itself.
    """
    settings, where = discovery.settings, discovery.where

    def read(reply: Any, _asked: Address) -> Address | None:
        return None if reply is None else Address(reply[0].decode(), int(reply[1]))

    def find(end: float) -> Endpoint:
        command = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", where.master)
        return endpoint_at(settings, where, discovery.ask(command, read, end))

    return Finder(
        str(where),
        find,
        verify=_verify_master,
        # If a master rejects writes because it has lost its replicas, the sentinels may already
        # have replaced it, so ask them again.
        not_executed=NOT_EXECUTED | {RefusalKind.NO_REPLICAS},
        connect_seconds=settings.connect_timeout,
    )


def _verify_master(opened: Transport) -> None:
    answers: list[Any] = []
    # Use HELLO instead of ROLE, because ROLE is in the category @dangerous, for which the user may
    # have no permission.
    opened.send([_HELLO])
    opened.receive(1, answers)
    [answer] = answers
    if isinstance(answer, RedisResponseError):
        raise answer
    role = dict(zip(answer[::2], answer[1::2], strict=True)).get(b"role", b"")
    if role != b"master":
        raise RedisUnavailableError(
            f"the sentinels name it as master, but its role is {role.decode()}",
            sent=False,
        )


def slot_finder(discovery: TopologyDiscovery, key: str) -> Finder:
    """Return a finder that looks up the master which serves the slot of a key."""
    settings, where, slot = discovery.settings, discovery.where, key_slot(key)

    def find(end: float) -> Endpoint:
        master = read_slot_map(discovery, end).master_for_slot(slot)
        if master is None:
            raise RedisUnavailableError(f"{where}: no node serves slot {slot}", sent=False)
        return endpoint_at(settings, where, master)

    def follow_redirect(endpoint: Endpoint, reply: RedisResponseError) -> None:
        redirect = parse_redirect(str(reply), endpoint.address)
        if redirect and not redirect.asking:
            discovery.prefer(redirect.address)

    return Finder(
        str(where),
        find,
        failed=lambda endpoint: discovery.avoid(endpoint.address),
        refused=follow_redirect,
        not_executed=NOT_EXECUTED,
        # Do not wait long for a node that hangs, because the cluster will soon replace it.
        connect_seconds=settings.connect_timeout,
    )


def read_slot_map(discovery: TopologyDiscovery, end: float) -> SlotMap:
    """Read the cluster's slot map from any node that answers before `end` (monotonic).

    Raises RedisUnavailableError with `sent=False` if there is none.
    """

    def read(reply: Any, asked: Address) -> SlotMap | None:
        return SlotMap.parse(reply, asked) if reply else None

    found = discovery.ask(("CLUSTER", "SLOTS"), read, end)
    discovery.add(found.masters)
    return found
