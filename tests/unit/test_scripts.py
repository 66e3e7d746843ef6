"""Headers of scripts are parsed and linted, and calls find scripts by name. No server."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from streamqd.errors import ContractError
from streamqd.model import ENTRIES_MAX, Assignment, Lease
from streamqd.store import dead, leases, messages, retention, scripts
from streamqd.store.keys import _GROUP_KEYS, _PARTITION_KEYS, Keys, key_by_name
from streamqd.store.scripts import ArgSpec, Call, KeySpec, Reply, Script

HEADER = """\
-- sample: here -> there
--
-- What it does,
-- in two lines.
--
-- KEYS[1]  source  STREAM  stream:{T}         where from
-- KEYS[2]? extra   HASH    streaming:{T}
--
-- ARGV[1]  token   token   the owner's
-- ARGV[2]  count   int     at most so many,
--                          or fewer
-- ARGV[3]  now     flag    at once
-- ARGV[4]  raw     bytes   anything
-- ARGV[5..] ids    list    the rest
--
-- Returns  OK    done   [2] how many
-- Returns  GONE  nothing there
--
-- Entry    MOVED   moved
--
-- Cost     O(1)
-- Repeat   safe
-- @include _block
"""
BODY = """
local source, extra = KEYS[1], KEYS[2]
local token, count, now, raw = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local ids = {unpack(ARGV, 5)}
local item = {}
item.word = 'MOVED'
if redis.call('XLEN', source) == 0 then
  return {'GONE'}
end

-- No writes above this line
redis.call('XADD', source, '*', 'token', token, 'count', count)
return {'OK', helper()}
"""
KEYS = {"source": "s", "extra": "e"}
ARGS = {"token": "t1", "count": 5, "now": True, "raw": b"\xff", "ids": ["1-0", b"2-0"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "_block.lua").write_text("local function helper()\n  return 7\nend\n")
    return tmp_path


@pytest.fixture
def sample(folder: Path) -> Script:
    return scripts.parse("sample", HEADER + BODY, folder)


def test_script_header_is_parsed(sample: Script) -> None:
    assert sample.summary == "here -> there"
    assert sample.prose == "What it does,\nin two lines."
    assert sample.keys == (
        KeySpec("source", "STREAM", "stream:{T}         where from", optional=False),
        KeySpec("extra", "HASH", "streaming:{T}", optional=True),
    )
    assert sample.args[1] == ArgSpec("count", "int", "at most so many, or fewer")
    assert [arg.type for arg in sample.args] == ["token", "int", "flag", "bytes", "list"]
    assert sample.returns == {"OK": "done   [2] how many", "GONE": "nothing there"}
    assert sample.values == {"OK": 1, "GONE": 0}
    assert sample.entry_returns == {"MOVED": "moved"}
    assert (sample.cost, sample.repeat) == ("O(1)", "safe")


def test_splices_shared_blocks_before_the_body(sample: Script) -> None:
    source = sample.source.decode()
    assert source.startswith("-- sample: here -> there\nlocal function helper()")
    assert source.endswith(BODY)
    assert "@include" not in source


def test_changed_block_changes_the_script_hash(sample: Script, folder: Path) -> None:
    (folder / "_block.lua").write_text("local function helper()\n  return 8\nend\n")
    assert scripts.parse("sample", HEADER + BODY, folder).sha != sample.sha


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("-- sample: here", "-- simple: here"),
        ("-- sample: here -> there", "-- sample"),
        ("KEYS[2]?", "KEYS[3]?"),
        ("KEYS[1]  source  STREAM", "KEYS[1]  source  QUEUE"),
        ("KEYS[1] ", "KEYS[1]?"),
        ("ARGV[2]", "ARGV[1]"),
        ("count   int", "count   number"),
        ("ARGV[5..] ids    list", "ARGV[5]  ids    list"),
        ("ARGV[4]  raw     bytes", "ARGV[4..] raw    bytes"),
        ("ARGV[4]  raw     bytes", "ARGV[4..] raw    list"),
        ("Returns  GONE  nothing there", "Returns  gone  nothing there"),
        ("-- Cost     O(1)\n", ""),
        ("-- Repeat   safe\n", ""),
    ],
)
def test_invalid_script_header_is_refused(folder: Path, old: str, new: str) -> None:
    assert HEADER.count(old) == 1
    with pytest.raises(ContractError, match="sample"):
        scripts.parse("sample", HEADER.replace(old, new) + BODY, folder)


def test_script_call_takes_keys_and_arguments_by_name(sample: Script) -> None:
    call = sample.call(KEYS, **ARGS)
    assert call == Call(sample, "s", ("s", "e", "t1", 5, 1, b"\xff", "1-0", b"2-0"))


def test_first_key_replaces_a_missing_optional_key(sample: Script) -> None:
    assert sample.call({"source": "s"}, **ARGS).argv[:2] == ("s", "s")


@pytest.mark.parametrize(
    ("keys", "args"),
    [
        ({"extra": "e"}, {}),
        ({}, {}),
        ({**KEYS, "other": "o"}, {}),
        ({"source": "s", "other": "o"}, {}),
        (KEYS, {"token": ""}),
        (KEYS, {"token": b"t1"}),
        (KEYS, {"count": "5"}),
        (KEYS, {"count": 5.0}),
        (KEYS, {"count": True}),
        (KEYS, {"now": 1}),
        (KEYS, {"raw": 7}),
        (KEYS, {"ids": "1-0"}),
        (KEYS, {"ids": None}),
        (KEYS, {"other": 1}),
    ],
)
def test_script_call_with_wrong_arguments_is_refused(
    sample: Script, keys: dict[str, str], args: dict[str, object]
) -> None:
    with pytest.raises(ContractError, match="sample"):
        sample.call(keys, **{**ARGS, **args})
    some = {name: value for name, value in ARGS.items() if name != "count"}
    with pytest.raises(ContractError, match="count"):
        sample.call(KEYS, **some)


def test_script_reply_is_parsed(sample: Script) -> None:
    call = sample.call(KEYS, **ARGS)
    assert scripts.reply(call, [b"OK", 7]) == Reply("OK", [7])
    assert scripts.reply(call, b"OK 7") == Reply("OK", [b"7"])
    for wrong in ([b"DONE"], [], None, b"DONE", [7], ["OK"]):
        with pytest.raises(ContractError, match="sample"):
            scripts.reply(call, wrong)


def test_lint_finds_nothing_in_a_good_script(sample: Script) -> None:
    assert scripts.lint(sample) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("local source, extra = KEYS[1], KEYS[2]", "local source = KEYS[1]", "KEYS"),
        ("local source, extra", "local stream, extra", "source"),
        ("local ids = {unpack(ARGV, 5)}", "local ids = ARGV[5]", "ARGV"),
        ("ARGV[3], ARGV[4]", "ARGV[3], ARGV[3]", "ARGV"),
        ("return {'GONE'}", "return {'NONE'}", "words returned"),
        ("item.word = 'MOVED'", "item.word = 'LEFT'", "words for entries"),
        ("redis.call('XLEN', source)", "redis.call('XTRIM', source)", "write before"),
        ("-- No writes above this line\n", "", "write before"),
        ("'XADD', source,", "'XADD', 'stream:x',", "not among KEYS"),
        ("'count', count)", "'count', tostring(count))", "tostring"),
        ("return {'GONE'}", "cjson.decode(raw) return {'GONE'}", "JSON"),
        ("return {'OK', helper()}", "return {'OK', helper()} -- " + "x" * 80, "characters"),
        (
            "redis.call('XADD', source, '*', 'token', token, 'count', count)",
            "",
            "scripts that write",
        ),
    ],
)
def test_lint_finds_every_mistake(folder: Path, old: str, new: str, problem: str) -> None:
    assert BODY.count(old) == 1
    broken = scripts.parse("sample", HEADER + BODY.replace(old, new), folder)
    assert any(problem in found for found in scripts.lint(broken)), scripts.lint(broken)


def test_lint_detects_writes_in_shared_functions(folder: Path) -> None:
    (folder / "_block.lua").write_text(
        "local function helper()\n  return redis.call('DEL', 'x')\nend\n"
    )
    broken = scripts.parse(
        "sample", HEADER + BODY.replace("return {'GONE'}", "helper() return {'GONE'}"), folder
    )
    assert "a write before the guards end" in scripts.lint(broken)


def test_lint_refuses_a_shebang(sample: Script) -> None:
    broken = replace(sample, source=b"#!lua flags=allow-oom\n" + sample.source)
    assert any("shebang" in found for found in scripts.lint(broken))


def test_every_script_exists_and_is_short() -> None:
    found = scripts.load()
    assert len({script.sha for script in found.values()}) == len(found)
    for name in ("lease_acquire", "message_recover", "settle_retry", "stream_trim"):
        assert scripts.get(name) is found[name]
    for script in found.values():
        assert script.body.count("\n") <= 80, script.name
    with pytest.raises(ContractError, match="nothing_such"):
        scripts.get("nothing_such")


def test_builders_refuse_invalid_arguments() -> None:
    keys, assignment = Keys(), Assignment("access", 0, "hits")
    calls: tuple[Callable[[], Call], ...] = (
        lambda: leases.renew(keys, Lease(assignment, ""), 15.0),
        lambda: leases.renew(keys, Lease(assignment, "t1"), 0.0),
        lambda: leases.refence(keys, Lease(assignment, "t1"), "t1", 15.0, None, b"", []),
        lambda: leases.refence(
            keys, Lease(assignment, "t1"), "t2", 15.0, None, b"", [b"m:1-0"] * (ENTRIES_MAX + 1)
        ),
        lambda: messages.ensure_group(keys, assignment, "5-0"),
        lambda: messages.recover(keys, Lease(assignment, "t1"), "", True, "", "", 10),
        lambda: messages.recover(keys, Lease(assignment, "t1"), "s1", True, "", "", 257),
        lambda: messages.promote_retries(keys, assignment, 0),
        lambda: retention.trim_retry(keys, assignment, 0),
        lambda: dead.purge_before(keys, "access", 0, "1-0", 257),
    )
    for wrong in calls:
        with pytest.raises(ContractError):
            wrong()


def test_charged_place_is_passed_once() -> None:
    call = messages.ack(
        Keys(), Lease(Assignment("a", 0, "g"), "t1"), [b"m:1-0", b"m:2-0"], [b"m:2-0"]
    )
    assert call.argv[4:] == ("t1", "g", 1, b"m:2-0", b"m:1-0")


# `source` is one of a pair's two streams, and schedules build other keys.
NAMED = (_GROUP_KEYS | _PARTITION_KEYS).keys() - {"source"}
PLACED = [
    pytest.param(script, key, id=f"{script.name}-{key.name}")
    for script in scripts.load().values()
    for key in script.keys
    if ":{T:p:i}" in key.pattern and key.name in NAMED
]


@pytest.mark.parametrize(("script", "key"), PLACED)
def test_keys_of_a_call_match_the_script_header(script: Script, key: KeySpec) -> None:
    """A name in a header means the same key in every script."""
    shown = key.pattern.replace("…", "streaming:mq")
    places: tuple[Assignment | tuple[str, int], ...] = (Assignment("T", 7, "G"), ("T", 7))
    built = set()
    for place in places:
        with contextlib.suppress(KeyError):
            built.add(key_by_name(Keys(), key.name, place).replace(":p:7}", ":p:i}"))
    assert built & set(re.split(r",? +(?:or )?", shown)), (shown, built)


def test_call_on_an_assignment_has_its_keys_and_group() -> None:
    keys, assignment = Keys(), Assignment("access", 3, "hits")
    call = scripts.build_call("assignment_measure", keys, assignment)
    assert call.argv == (
        keys.stream("access", 3), keys.retry_stream(*assignment), keys.retry(*assignment), "hits"
    )  # fmt: skip
    sends = scripts.build_call("retry_make_due", keys, ("access", 3), places=["a"])
    assert sends.argv == (keys.delayed_sends("access", 3), "a")
    with pytest.raises(KeyError):
        scripts.build_call("lease_renew", keys, ("access", 3), token="t", ttl_ms=1)
    without = scripts.build_call(
        "settle_ack", keys, assignment, token="t", charged_count=0, places=[]
    )
    assert keys.attempts(*assignment) not in without.argv
