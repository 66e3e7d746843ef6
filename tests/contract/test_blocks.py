"""The shared blocks: arithmetic on ids, lists and numbers, where Lua's own would be wrong."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from streamqd.store import scripts
from tests.contract.desk import Desk

LUA = Path(scripts._directory())
LAST = 2**64 - 1


def evaluate(desk: Desk, block: str, code: str, *arguments: object) -> Any:
    source = (LUA / f"{block}.lua").read_text("utf-8") + "\n" + code
    return desk.do("EVAL", source, 0, *arguments)


def ids() -> list[tuple[int, int]]:
    edges = [0, 1, 9, 10, 99, 100, 2**53 - 1, 2**53, 2**53 + 1, 10**19, LAST - 1, LAST]
    chance = random.Random(7)
    drawn = [(chance.choice(edges), chance.choice(edges)) for _ in range(60)]
    return [*drawn, *((chance.getrandbits(64), chance.getrandbits(64)) for _ in range(20))]


def text(entry_id: tuple[int, int]) -> str:
    return f"{entry_id[0]}-{entry_id[1]}"


@pytest.mark.parametrize("entry_id", ids(), ids=text)
def test_successor_and_predecessor(desk: Desk, entry_id: tuple[int, int]) -> None:
    ms, seq = entry_id
    after = (ms, seq + 1) if seq < LAST else (ms + 1, 0)
    before = (ms, seq - 1) if seq else (ms - 1, LAST) if ms else (0, 0)
    code = "return {successor(ARGV[1]), predecessor(ARGV[1])}"
    found = evaluate(desk, "_ids", code, text(entry_id))
    assert found == [text(after).encode(), text(before).encode()]


def test_order(desk: Desk) -> None:
    drawn = ids()
    code = """
        local found = {}
        for at = 1, #ARGV, 2 do
          found[#found + 1] = older(ARGV[at], ARGV[at + 1]) and 1 or 0
        end
        return found
    """
    pairs = [(a, b) for a in drawn[::3] for b in drawn[::4]]
    found = evaluate(desk, "_ids", code, *(text(part) for pair in pairs for part in pair))
    assert found == [int(a < b) for a, b in pairs]


def test_an_id_may_be_a_time_alone(desk: Desk) -> None:
    code = "return {older('5', '5-1') and 1 or 0, older('5-0', '5') and 1 or 0, successor('5')}"
    assert evaluate(desk, "_ids", code) == [1, 0, b"5-1"]


def test_numbers_go_out_whole(desk: Desk) -> None:
    """Lua's own conversion answers 1.7890000000012e+12."""
    code = "return {text(1789000000001234), text(now_unix_ms())}"
    with desk.instant() as now:
        found = evaluate(desk, "_clock", code)
    assert found[0] == b"1789000000001234"
    assert now == found[1]
