"""The shared blocks calculate with IDs, lists and numbers that Lua's own operators get wrong."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from streamqd.store import scripts
from tests.contract.harness import Harness

LUA = Path(scripts._directory())
LAST = 2**64 - 1


def evaluate(harness: Harness, block: str, code: str, *arguments: object) -> Any:
    source = (LUA / f"{block}.lua").read_text("utf-8") + "\n" + code
    return harness.do("EVAL", source, 0, *arguments)


def ids() -> list[tuple[int, int]]:
    edges = [0, 1, 9, 10, 99, 100, 2**53 - 1, 2**53, 2**53 + 1, 10**19, LAST - 1, LAST]
    chance = random.Random(7)
    drawn = [(chance.choice(edges), chance.choice(edges)) for _ in range(60)]
    return [*drawn, *((chance.getrandbits(64), chance.getrandbits(64)) for _ in range(20))]


def text(entry_id: tuple[int, int]) -> str:
    return f"{entry_id[0]}-{entry_id[1]}"


@pytest.mark.parametrize("entry_id", ids(), ids=text)
def test_id_successor_and_predecessor_are_exact(
    harness: Harness, entry_id: tuple[int, int]
) -> None:
    ms, seq = entry_id
    after = (ms, seq + 1) if seq < LAST else (ms + 1, 0) if ms < LAST else (ms, seq)
    before = (ms, seq - 1) if seq else (ms - 1, LAST) if ms else (0, 0)
    code = "return {successor(ARGV[1]), predecessor(ARGV[1])}"
    found = evaluate(harness, "_ids", code, text(entry_id))
    assert found == [text(after).encode(), text(before).encode()]


def test_older_compares_ids_numerically(harness: Harness) -> None:
    drawn = ids()
    code = """
        local found = {}
        for at = 1, #ARGV, 2 do
          found[#found + 1] = older(ARGV[at], ARGV[at + 1]) and 1 or 0
        end
        return found
    """
    pairs = [(a, b) for a in drawn[::3] for b in drawn[::4]]
    found = evaluate(harness, "_ids", code, *(text(part) for pair in pairs for part in pair))
    assert found == [int(a < b) for a, b in pairs]


def test_is_id_accepts_only_entry_ids(harness: Harness) -> None:
    """Only entry IDs are accepted, because there may be any value in their place."""
    code = "local found = {} for at, raw in ipairs(ARGV) do found[at] = is_id(raw) and 1 or 0 end"
    good = ["0-0", "1-5", f"{LAST}-{LAST}"]
    bad = ["", "5", "junk", "1-", "-1", "1-5-", f"{LAST + 1}-0", f"0-{LAST + 1}", "1 - 5", "0x1-1"]
    assert evaluate(harness, "_ids", code + " return found", *good, *bad) == [1] * 3 + [0] * 10


def test_to_int_accepts_only_plain_decimals(harness: Harness) -> None:
    """Only plain decimals are accepted. Lua's own conversion would accept hex and infinity."""
    code = "local found = {} for at, raw in ipairs(ARGV) do found[at] = to_int(raw) or 'none' end"
    good = [0, 7, 2**53 - 1]
    bad = ["", "abc", "-1", "1e308", "inf", "nan", "0x10", " 7", "7.5", 2**53, "9" * 26]
    found = evaluate(harness, "_numbers", code + " return found", *good, *bad)
    assert found == [*good, *[b"none"] * len(bad)]
    assert evaluate(harness, "_numbers", "return {to_int(false), to_int(nil)}") == [0, 0]


def test_increment_restarts_an_invalid_counter(harness: Harness) -> None:
    """An invalid counter starts again.

    It must not be an error, because a script counts only after its effects.
    """
    source = (LUA / "_numbers.lua").read_text("utf-8") + "\nreturn increment(KEYS[1], 'f', 2)"
    for before, after in (("5", 7), ("abc", 2), ("9" * 26, 2), (2**63 - 1, 2)):
        harness.do("HSET", "h", "f", before)
        assert harness.do("EVAL", source, 1, "h") == after
        assert harness.do("HGET", "h", "f") == str(after).encode()


def test_text_clamps_infinite_numbers(harness: Harness) -> None:
    code = "return {text(tonumber('inf')), text(tonumber('-inf')), text(1e300)}"
    most = str(2**53 - 1).encode()
    assert evaluate(harness, "_clock", code) == [most, b"-" + most, most]


def test_older_accepts_an_id_without_a_sequence(harness: Harness) -> None:
    code = "return {older('5', '5-1') and 1 or 0, older('5-0', '5') and 1 or 0, successor('5')}"
    assert evaluate(harness, "_ids", code) == [1, 0, b"5-1"]


def test_lua_replies_keep_all_digits_of_integers(harness: Harness) -> None:
    """Integers keep all digits, where Lua's own conversion would return 1.7890000000012e+12."""
    code = "return {text(1789000000001234), text(now_unix_ms())}"
    with harness.instant() as now:
        found = evaluate(harness, "_clock", code)
    assert found[0] == b"1789000000001234"
    assert now == found[1]
