"""Commands as the bytes that the server reads."""

from __future__ import annotations

import hiredis
from hypothesis import given
from hypothesis import strategies as st

from streamqd.producer.guard import ClusterGuard, Guard
from streamqd.store.keys import Keys

NAMES = st.sampled_from(["stream:topic:{access:p:0}", "stream:topic:{access:p:1}", "s"])
VALUES = st.binary(max_size=300)
FIELDS = st.lists(st.tuples(st.sampled_from([b"payload", b"key", b"x"]), VALUES), min_size=1)
ENTRIES = st.lists(
    st.tuples(NAMES, FIELDS.map(lambda pairs: [each for pair in pairs for each in pair]))
)


@given(ENTRIES)
def test_entries_are_packed_as_hiredis_packs_them(entries: list[tuple[str, list[bytes]]]) -> None:
    commands = [("XADD", stream, "*", *fields) for stream, fields in entries]

    assert Guard(Keys()).appends(entries) == [hiredis.pack_command(each) for each in commands]
    assert ClusterGuard(Keys()).appends(entries) == commands
