"""Finding the node to talk to, when there are several: by sentinels, or by the map of a cluster.

A connection to one of several nodes is found anew each time it is opened: who was the master a
moment ago may have been stopped, demoted or cut off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from streamqd.config.topology import Address
from streamqd.errors import RedisRefused, RedisUnavailable, RefusalKind
from streamqd.store.client import DROP_AFTER, Connection
from streamqd.store.slots import SlotMap, redirect_of, slot_of
from streamqd.store.wire import Lookup, Transport, resolve, wire_to

if TYPE_CHECKING:
    from streamqd import config
    from streamqd.config.topology import Topology

# A node that answers so did nothing, and cannot do it now: another node can, or it can later.
NOT_NOW = frozenset({RefusalKind.AWAY, RefusalKind.MOVED, RefusalKind.REPLICA})
_LEAST_SECONDS = 0.05  # of patience with one node, even when the others have used up the time
_T = TypeVar("_T")


class TopologyDiscovery:
    """Asks one node after the other until one knows; remembers whom to ask first.

    All of it takes `connect_timeout` at most, and `timeout` seconds.
    """

    def __init__(
        self,
        settings: config.Redis,
        where: Topology,
        timeout: float,
        *,
        of_sentinels: bool,
        lookup: Lookup = resolve,
    ) -> None:
        self.settings = settings
        self.where = where
        self._timeout = min(timeout, settings.connect_timeout)
        self._of_sentinels = of_sentinels
        self._lookup = lookup
        self._order = list(where.addresses)

    def prefer(self, address: Address) -> None:
        """Ask this one first: it knows, or is said to."""
        self._order = [address, *(each for each in self._order if each != address)]

    def avoid(self, address: Address) -> None:
        """Ask this one last: it did not answer."""
        if address in self._order:
            self._order = [*(each for each in self._order if each != address), address]

    def known(self, addresses: Sequence[Address]) -> None:
        """Ask these too from now on; but those of the configuration are never forgotten."""
        kept = {*addresses, *self.where.addresses}
        new = [each for each in addresses if each not in self._order]
        self._order = [each for each in self._order if each in kept] + new

    def ask(
        self, command: Sequence[Any], read: Callable[[Any, Address], _T | None], end: float
    ) -> _T:
        """Return what `read` makes of the first reply of which it makes something.

        Nobody is asked beyond `end` (monotonic). Raises RedisUnavailable with `sent=False`.
        """
        trouble: list[str] = []
        for address, seconds in self._turns(end):
            wire = wire_to(
                self.settings, self.where, address, seconds, to_sentinel=self._of_sentinels
            )
            link = Connection(
                self.settings,
                timeout=seconds,
                name="streamqd:where",
                wire=wire,
                lookup=self._lookup,
            )
            link.until(time.monotonic() + seconds)
            try:
                found = read(link.execute(*command), address)
            except (RedisUnavailable, RedisRefused) as error:
                trouble.append(str(error))
                self.avoid(address)
                continue
            finally:
                link.close()
            if found is not None:
                self.prefer(address)
                return found
            trouble.append(f"{address} does not know")
        said = "; ".join(trouble) or "no time was left"
        raise RedisUnavailable(f"{self.where}: {said}", sent=False)

    def _turns(self, end: float) -> Iterator[tuple[Address, float]]:
        """Each node with the seconds that it has; nobody may use up the time of all others."""
        deadline = min(time.monotonic() + self._timeout, end)
        order = list(self._order)
        for number, address in enumerate(order):
            now = time.monotonic()
            if now >= end:
                return
            left = deadline - now
            share = left / 2 if number + 1 < len(order) else left
            yield address, min(max(_LEAST_SECONDS, share), end - now)


class LocatedConnection(Connection):
    """A link to the one of several nodes that is the right one at the time of connecting.

    After an answer that says that it is not the right one any more, or not now, the connection is
    closed, and the answer is RedisUnavailable: nothing was done.
    """

    _not_now = NOT_NOW
    _drop_after = DROP_AFTER | NOT_NOW

    def __init__(
        self, settings: config.Redis, where: Topology, *, timeout: float, name: str, lookup: Lookup
    ) -> None:
        super().__init__(
            settings,
            timeout=timeout,
            name=name,
            wire=wire_to(settings, where, where.addresses[0], timeout),
            lookup=lookup,
        )
        self.settings = settings
        self.where = where
        self.spare = lambda seconds: wire_to(settings, where, address_of(self._wire), seconds)
        # A node that hangs is about to be replaced: nobody waits for it as for an answer.
        self._opening = min(timeout, settings.connect_timeout)

    @property
    def address(self) -> str:
        """Where it connects to, for people: the node that was found last."""
        return f"{self.where}, {self._wire.address}" if self.opened else str(self.where)

    def collect(self, count: int) -> list[Any]:
        replies = super().collect(count)
        wrong = [
            each
            for each in replies
            if isinstance(each, RedisRefused) and each.kind in self._not_now
        ]
        if wrong:
            raise RedisUnavailable(f"{self.address}: {wrong[0]}", sent=len(wrong) < len(replies))
        return replies


class SentinelConnection(LocatedConnection):
    """A link to the master that sentinels name; it has to say of itself that it is one."""

    # A master that lost its replicas may have been replaced without knowing.
    _not_now = NOT_NOW | {RefusalKind.NO_REPLICAS}
    _drop_after = DROP_AFTER | _not_now

    def __init__(
        self, settings: config.Redis, where: Topology, *, timeout: float, name: str, lookup: Lookup
    ) -> None:
        super().__init__(settings, where, timeout=timeout, name=name, lookup=lookup)
        self._inquiry = TopologyDiscovery(
            settings, where, timeout, of_sentinels=True, lookup=lookup
        )

    def _locate(self) -> Transport:
        def read(reply: Any, _asked: Address) -> Address | None:
            return None if reply is None else Address(reply[0].decode(), int(reply[1]))

        command = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.where.master)
        found = self._inquiry.ask(command, read, self._end)
        return wire_to(self.settings, self.where, found, self.timeout)

    def _verify(self, wire: Transport) -> None:
        # HELLO tells the role to users that are not allowed ROLE, which counts as dangerous.
        wire.transmit([b"".join(wire.pack_command("HELLO", "2"))])  # type: ignore[no-untyped-call]
        answer = wire.receive()
        if isinstance(answer, RedisRefused):
            raise answer
        role = dict(zip(answer[::2], answer[1::2], strict=True)).get(b"role", b"")
        if role != b"master":
            raise RedisUnavailable(
                f"the sentinels name it as master, and it says that it is a {role.decode()}",
                sent=False,
            )


class SlotConnection(LocatedConnection):
    """A link to the master that serves the slot of one key."""

    def __init__(
        self,
        settings: config.Redis,
        where: Topology,
        *,
        timeout: float,
        name: str,
        lookup: Lookup,
        key: str,
    ) -> None:
        super().__init__(settings, where, timeout=timeout, name=name, lookup=lookup)
        self._inquiry = TopologyDiscovery(
            settings, where, timeout, of_sentinels=False, lookup=lookup
        )
        self._slot = slot_of(key)

    def _locate(self) -> Transport:
        found = survey(self._inquiry, self._end)
        master = found.master_of(self._slot)
        if master is None:
            raise RedisUnavailable(f"{self.where}: no node serves slot {self._slot}", sent=False)
        return wire_to(self.settings, self.where, master, self.timeout)

    def open(self) -> None:
        try:
            super().open()
        except RedisUnavailable:
            self._inquiry.avoid(address_of(self._wire))
            raise

    def judge(self, replies: Iterable[Any]) -> RedisRefused | None:
        refused = super().judge(replies)
        redirect = refused and redirect_of(str(refused), address_of(self._wire))
        if redirect and not redirect.asking:
            self._inquiry.prefer(redirect.address)
        return refused


def survey(inquiry: TopologyDiscovery, end: float) -> SlotMap:
    """Ask for the map of the cluster, until `end`. Raises RedisUnavailable with `sent=False`."""

    def read(reply: Any, asked: Address) -> SlotMap | None:
        return SlotMap.parse(reply, asked) if reply else None

    found = inquiry.ask(("CLUSTER", "SLOTS"), read, end)
    inquiry.known(found.masters)
    return found


def address_of(wire: Transport) -> Address:
    """The node that a connection leads to."""
    return Address(wire.host, int(vars(wire)["port"]))
