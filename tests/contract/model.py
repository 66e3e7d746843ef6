"""A model of one partition in plain Python: the effect of each script on the keyspace.

The model follows the protocol, not the Lua code. A group has each message in exactly one place, and
each operation either moves the message to another place or does nothing.
"""

from __future__ import annotations

from tests.contract.picture import Fields, Group, Picture, order


class Model:
    """The expected keyspace. Each method models a script and returns its expected word."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.now = Picture({}, {}, {name: Group() for name in names})
        self.acked: dict[str, set[bytes]] = {name: set() for name in names}
        self.charges: dict[tuple[str, bytes], int] = {}
        self.due: dict[str, set[str]] = {name: set() for name in names}
        self.bodies: dict[str, Fields] = {}  # every entry that was ever written to the partition

    # --- the lease ---

    def acquire(self, name: str, token: str, seen: int, dead: str, epoch: int) -> str:
        group = self.now.groups[name]
        if group.lease not in ("", token) and (not dead or group.lease != dead):
            return "HELD"
        if group.token == token:
            group.lease = token
            return "MINE"
        if group.epoch != seen:
            return "MOVED"
        unclean = group.token != ""
        if unclean:
            self._suspect(name, group.mark.split())
        assert epoch > group.epoch
        group.session = group.mark = ""
        group.quarantine = group.quarantine or unclean
        group.token, group.lease, group.epoch = token, token, epoch
        return "OK"

    def _suspect(self, name: str, marked: list[str]) -> None:
        """Charge the entry that ran alone when the owner was lost, or accuse all marked entries."""
        group = self.now.groups[name]
        if len(marked) > 1:
            earlier = " ".join(group.accused)
            kept = [] if len(earlier) > len(" ".join(marked)) else group.accused
            group.accused = [*kept, *marked]
        elif marked and marked[0] in group.pending:
            (place,) = marked
            crashes = int(group.attempts.get(f"{place}:c", 0))
            if crashes or place in group.accused:
                self._charge(name, place, 1 if crashes else 3)
            else:
                group.accused = [*group.accused, place]

    def renew(self, name: str, token: str) -> str:
        group = self.now.groups[name]
        if group.token != token:
            return "FENCED"
        if group.lease not in ("", token):
            return "LOST"
        word = "OK" if group.lease else "LATE"
        group.lease = token
        return word

    def refence(
        self, name: str, old: str, new: str, charged: str, done: tuple[str, ...], epoch: int
    ) -> str:
        group = self.now.groups[name]
        if group.token == new:
            return "OK"
        if group.token != old:
            return "FENCED"
        if charged in group.pending:
            self._charge(name, charged)
            group.attempts[f"{charged}:last"] = b"signal 9"
        assert epoch > group.epoch
        group.session = group.mark = ""
        group.token, group.lease, group.epoch = new, new, epoch
        for place in done:
            self._forget(group, place)
            self._ack(name, place)
        return "OK"

    def release(self, name: str, token: str) -> str:
        group = self.now.groups[name]
        if group.token != token:
            return "FENCED"
        if group.lease == token:
            group.lease = ""
        group.token = group.session = group.mark = ""
        group.quarantine, group.accused = False, []
        return "OK"

    # --- reading ---

    def recover(self, name: str, token: str, session: str) -> str:
        group = self.now.groups[name]
        if group.token != token:
            return "FENCED"
        group.session = session
        return "OK"

    def fetch(self, name: str, consumer: str, places: list[str]) -> None:
        group = self.now.groups[name]
        for place in places:
            group.pending[place] = consumer
            if place[0] == "m":
                group.last_main = place[2:]
            else:
                group.last_retry = place[2:]

    def reclaim(self, name: str, token: str, session: str, letter: str) -> str:
        group = self.now.groups[name]
        if group.token != token:
            return "FENCED"
        if group.session != session:
            return "SESSION"
        for place in group.pending:
            if place[0] == letter:
                group.pending[place] = "w"
        return "OK"

    # --- settling ---

    def ack(self, name: str, token: str, charged: tuple[str, ...], others: tuple[str, ...]) -> str:
        group = self.now.groups[name]
        if group.token != token:
            return "FENCED"
        for place in charged:
            self._forget(group, place)
        for place in (*charged, *others):
            self._ack(name, place)
        return "OK"

    def retry(
        self, name: str, token: str, items: tuple[tuple[str, bool, Fields], ...]
    ) -> tuple[str, list[str]]:
        group = self.now.groups[name]
        if group.token != token:
            return "FENCED", []
        words = []
        for place, now, changed in items:
            if place not in group.pending:
                words.append("GONE")
                continue
            group.delayed[place] = {**self.body(name, place), **changed}
            self.due[name].discard(place)
            if now:
                self.due[name].add(place)
            del group.pending[place]
            self._forget(group, place)
            words.append("MOVED")
        return "OK", words

    def dead(
        self, name: str, token: str, items: tuple[tuple[str, Fields], ...], letters: list[str]
    ) -> tuple[str, list[str]]:
        group = self.now.groups[name]
        if group.token != token:
            return "FENCED", []
        words = []
        for at, (place, changed) in enumerate(items):
            if place not in group.pending:
                words.append("GONE")
                continue
            self.now.dlq[letters[at]] = {**self.body(name, place), **changed}
            del group.pending[place]
            self._forget(group, place)
            words.append("MOVED")
        return "OK", words

    def quarantine_mark(
        self, name: str, token: str, session: str, places: str, acked: tuple[str, ...]
    ) -> str:
        group = self.now.groups[name]
        if group.token != token:
            return "FENCED"
        if group.session != session:
            return "SESSION"
        for done in acked:
            self._ack(name, done)
        group.mark = places
        if not places:
            group.quarantine, group.accused = False, []
        return "OK"

    # --- without an owner ---

    def promote(self, name: str, count: int, written: dict[str, Fields]) -> None:
        """Move due entries to the IDs that the server chose. Any due entry may come first."""
        group = self.now.groups[name]
        assert len(written) == min(count, len(self.due[name]))
        for new_id, fields in written.items():
            place = next(p for p in self.due[name] if group.delayed[p] == fields)
            self.due[name].remove(place)
            group.retry[new_id] = group.delayed.pop(place)

    def replay(self, name: str, letter: str, new_id: str) -> str:
        fields = self.now.dlq.get(letter)
        if fields is None:
            return "GONE"
        if fields["group"].decode() != name:
            return "MISMATCH"
        del self.now.dlq[letter]
        self.charges.pop((name, fields["payload"]), None)
        kept = {k: v for k, v in fields.items() if k not in ("group", "reason")}
        self.now.groups[name].retry[new_id] = {**kept, "crashCount": b"0"}
        return "OK"

    # --- looking ---

    def body(self, name: str, place: str) -> Fields:
        if place[0] == "m":
            return self.bodies[place[2:]]
        return self.now.groups[name].retry[place[2:]]

    def payload(self, name: str, place: str) -> bytes:
        return self.body(name, place)["payload"]

    def unread(self, name: str) -> list[str]:
        """Return the places that have been written but not delivered."""
        group = self.now.groups[name]
        main = [f"m:{i}" for i in self.now.stream if order(i) > order(group.last_main)]
        return main + [f"r:{i}" for i in group.retry if order(i) > order(group.last_retry)]

    def trim(self) -> None:
        """Remove all entries if no group needs any.

        Otherwise, keep all, because they fill less than one node.
        """
        ids = set(self.now.stream)
        waiting = any(
            self.unread_main(name) or any(p[0] == "m" for p in group.pending)
            for name, group in self.now.groups.items()
        )
        if ids and not waiting:
            self.now.stream.clear()

    def unread_main(self, name: str) -> bool:
        return any(place[0] == "m" for place in self.unread(name))

    def trim_retry(self, name: str) -> None:
        group = self.now.groups[name]
        places = {f"r:{i}" for i in group.retry}
        if not places & {*group.pending, *self.unread(name)}:
            group.retry.clear()

    # --- inside ---

    def _ack(self, name: str, place: str) -> None:
        group = self.now.groups[name]
        if place in group.pending:
            self.acked[name].add(self.payload(name, place))
            del group.pending[place]

    def _charge(self, name: str, place: str, crashes: int = 1) -> None:
        group = self.now.groups[name]
        key = f"{place}:c"
        group.attempts[key] = b"%d" % (int(group.attempts.get(key, 0)) + crashes)
        which = (name, self.payload(name, place))
        self.charges[which] = self.charges.get(which, 0) + crashes

    def _forget(self, group: Group, place: str) -> None:
        for what in ("c", "f", "last"):
            group.attempts.pop(f"{place}:{what}", None)
