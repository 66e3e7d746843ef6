"""Load the Lua scripts, and build calls and parse replies according to their contracts.

Each file in `lua/` starts with a header, the contract of the script. It declares the keys, the
arguments and the words with which a reply may start. Callers pass keys and arguments by name, and
the header determines their positions. A file whose name starts with an underscore is a shared
block, which is inserted into each script whose header has an `@include` line for it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from streamqd.errors import ContractError, RedisResponseError, RedisUnavailableError
from streamqd.model import Assignment
from streamqd.store.keys import Keys, Place, key_by_name

KEY_TYPES = frozenset({"HASH", "LIST", "SET", "STREAM", "STRING", "ZSET"})
ARG_TYPES = frozenset({"bytes", "flag", "id", "int", "list", "str", "token"})
GUARDS_END = "-- No writes above this line"


@dataclass(frozen=True, slots=True)
class KeySpec:
    """A key that a script declares.

    If the caller omits an optional key, the first key of the script is passed again in its place,
    so that the positions of the others do not change.
    """

    name: str
    type: str
    pattern: str
    optional: bool


@dataclass(frozen=True, slots=True)
class ArgSpec:
    """An argument that a script declares.

    An argument of type `token` must not be empty. A `list` takes all remaining arguments.
    """

    name: str
    type: str
    meaning: str


@dataclass(frozen=True, slots=True, eq=False)
class Script:
    """A script with its contract and its source."""

    name: str
    summary: str
    prose: str
    keys: tuple[KeySpec, ...]
    args: tuple[ArgSpec, ...]
    returns: Mapping[str, str]
    entry_returns: Mapping[str, str]
    cost: str
    repeat: str
    includes: tuple[str, ...]
    body: str
    source: bytes
    sha: str
    values: Mapping[str, int]  # the minimum number of values after each word

    def call(self, keys: Mapping[str, str], **args: object) -> Call:
        """Build a call, with keys and arguments in the order that the header declares.

        Raises ContractError if a name is missing or unknown, or if an argument has the wrong type.
        """
        first = keys.get(self.keys[0].name)
        argv: list[Any] = []
        for key in self.keys:
            name = keys.get(key.name, first if key.optional else None)
            if name is None:
                raise ContractError(f"{self.name}: key {key.name} is missing")
            argv.append(name)
        for arg in self.args:
            if arg.name not in args:
                raise ContractError(f"{self.name}: argument {arg.name} is missing")
            value = args[arg.name]
            if arg.type == "list" and isinstance(value, list | tuple):
                argv.extend(value)
            else:
                argv.append(_argument(self.name, arg, value))
        unknown = {*keys} - {key.name for key in self.keys}
        unknown |= {*args} - {arg.name for arg in self.args}
        if unknown:
            raise ContractError(f"{self.name}: unknown names {sorted(unknown)}")
        assert first is not None
        return Call(self, first, tuple(argv))


class Call(NamedTuple):
    """A call of a script.

    `key` is the first key, which determines the node on a cluster. `argv` contains all keys and
    arguments in order.
    """

    script: Script
    key: str
    argv: tuple[Any, ...]


class Reply(NamedTuple):
    """The reply of a script, which consists of a word from its contract and the values after it."""

    word: str
    values: list[Any]


# The result of one of several calls, which is a reply or an error.
Answer = Reply | RedisResponseError | RedisUnavailableError | ContractError


def command(call: Call, *, by_source: bool = False) -> tuple[Any, ...]:
    """Return the command that executes a call.

    By default, it is EVALSHA with the hash of the script. If `by_source` is True, it is EVAL with
    the source, for a server that has not loaded the script.
    """
    if by_source:
        return ("EVAL", call.script.source, len(call.script.keys), *call.argv)
    return ("EVALSHA", call.script.sha, len(call.script.keys), *call.argv)


def reply(call: Call, raw: object) -> Reply:
    """Parse the server's reply to a call.

    A reply is either a list that starts with a word, or a string that consists of the word and the
    values, separated by spaces. The types of the values are not checked. Raises ContractError if
    the script's header does not list the word, or if there are too few values.
    """
    name = call.script.name
    if isinstance(raw, bytes):
        raw = raw.split(b" ")
    if not isinstance(raw, list) or not raw or not isinstance(raw[0], bytes):
        raise ContractError(f"{name} returned {raw!r}")
    word = raw[0].decode("ascii", "replace")
    values = call.script.values.get(word)
    if values is None:
        raise ContractError(f"{name} returned {word}, which its contract does not list")
    if len(raw) <= values:
        raise ContractError(f"{name} returned {word} with {len(raw) - 1} values, not {values}")
    return Reply(word, raw[1:])


@lru_cache(maxsize=1)
def load() -> dict[str, Script]:
    """Return all scripts by name. The files are read only once per process.

    Raises ContractError if a header is invalid.
    """
    directory = _directory()
    return {
        path.stem: parse(path.stem, path.read_text("utf-8"), directory)
        for path in sorted(directory.glob("[!_]*.lua"))
    }


def get(name: str) -> Script:
    """Return the script with this name. Raises ContractError if there is none."""
    try:
        return load()[name]
    except KeyError:
        raise ContractError(f"script {name} not found") from None


def build_call(
    name: str,
    keys: Keys,
    place: Place,
    /,
    *,
    optional: Collection[str] = (),
    **args: object,
) -> Call:
    """Build a call whose keys all belong to one assignment, partition or topic.

    `place` is the assignment, partition or topic, from which the keys that the header names are
    built. An optional key is passed only if its name is in `optional`. If the script has an
    argument `group`, the group of the assignment is passed automatically. Raises ContractError if
    an argument is missing or unknown.
    """
    script = get(name)
    wanted = [key.name for key in script.keys if not key.optional or key.name in optional]
    if isinstance(place, Assignment) and any(arg.name == "group" for arg in script.args):
        args["group"] = place.group
    return script.call({each: key_by_name(keys, each, place) for each in wanted}, **args)


_FIRST = re.compile(r"-- (\w+): (.+)")
_KEY = re.compile(r"KEYS\[(\d+)\](\??)\s+(\w+)\s+(\w+)\s+(.+)")
_ARG = re.compile(r"ARGV\[(\d+)(?:\.\.)?\]\s+(\w+)\s+(\w+)\s+(.+)")
_WORD = re.compile(r"(?:Returns|Entry)\s+([A-Z][A-Z_]*)\s+(.+)")
_VALUE = re.compile(r"\[(\d+)\]")  # the position of a value in a reply
_FIELD = re.compile(r"-- (KEYS\[|ARGV\[|Returns |Entry |Cost |Repeat |@include )")


def parse(name: str, text: str, directory: Path) -> Script:
    """Parse one script, including its shared blocks.

    Raises ContractError if the header is invalid.
    """
    lines = text.split("\n")
    first = _FIRST.fullmatch(lines[0])
    if first is None or first[1] != name:
        raise ContractError(f"{name}: line 1 must be `-- {name}: TRANSITION`")
    height = next((n for n, line in enumerate(lines) if not line.startswith("--")), len(lines))
    prose, fields = _header_fields(lines[1:height])
    keys = tuple(_key(name, at, line) for at, line in enumerate(fields["KEYS["], 1))
    args = tuple(_arg(name, at, line) for at, line in enumerate(fields["ARGV["], 1))
    if not keys or keys[0].optional:
        raise ContractError(f"{name}: the first key is required and cannot be optional")
    if any(arg.type == "list" for arg in args[:-1]):
        raise ContractError(f"{name}: only the last argument may be a list")
    if len(fields["Cost "]) != 1 or len(fields["Repeat "]) != 1:
        raise ContractError(f"{name}: the header needs one Cost and one Repeat")
    returns = dict(_word(name, line) for line in fields["Returns "])
    includes = tuple(line.removeprefix("@include ").strip() for line in fields["@include "])
    body = "\n".join(lines[height:])
    blocks = [(directory / f"{block}.lua").read_text("utf-8") for block in includes]
    source = "\n".join((lines[0], *blocks, body)).encode()
    return Script(
        name=name,
        summary=first[2],
        prose=prose,
        keys=keys,
        args=args,
        returns=returns,
        entry_returns=dict(_word(name, line) for line in fields["Entry "]),
        cost=fields["Cost "][0].removeprefix("Cost ").strip(),
        repeat=fields["Repeat "][0].removeprefix("Repeat ").strip(),
        includes=includes,
        body=body,
        source=source,
        sha=hashlib.sha1(source, usedforsecurity=False).hexdigest(),
        values={word: _values_in(meaning) for word, meaning in returns.items()},
    )


def _header_fields(lines: Sequence[str]) -> tuple[str, dict[str, list[str]]]:
    """Divide the lines of a header into prose and fields, and return both, with fields by kind.

    An indented line continues the field before it.
    """
    kinds = ("KEYS[", "ARGV[", "Returns ", "Entry ", "Cost ", "Repeat ", "@include ")
    fields: dict[str, list[str]] = {kind: [] for kind in kinds}
    prose: list[str] = []
    current: list[str] = prose
    for line in lines:
        found = _FIELD.match(line)
        if found:
            current = fields[found[1]]
            current.append(line[3:])
        elif line.startswith("--    ") and current is not prose:
            current[-1] += " " + line[2:].strip()
        else:
            current = prose
            prose.append(line[3:])
    return "\n".join(prose).strip(), fields


def _key(name: str, at: int, line: str) -> KeySpec:
    found = _KEY.fullmatch(line)
    if found is None or int(found[1]) != at or found[4] not in KEY_TYPES:
        raise ContractError(f"{name}: cannot read `{line}`")
    return KeySpec(found[3], found[4], found[5].strip(), optional=bool(found[2]))


def _arg(name: str, at: int, line: str) -> ArgSpec:
    found = _ARG.fullmatch(line)
    if found is None or int(found[1]) != at or found[3] not in ARG_TYPES:
        raise ContractError(f"{name}: cannot read `{line}`")
    if (found[3] == "list") != (".." in line.split("]")[0]):
        raise ContractError(f"{name}: a list is written ARGV[n..], and only a list is: `{line}`")
    return ArgSpec(found[2], found[3], found[4].strip())


def _word(name: str, line: str) -> tuple[str, str]:
    found = _WORD.fullmatch(line)
    if found is None:
        raise ContractError(f"{name}: cannot read `{line}`")
    return found[1], found[2].strip()


def _values_in(meaning: str) -> int:
    """Return the number of values that the header lists for a word.

    The word itself has position 1, so a value at position `[2]` is the first one.
    """
    return max((int(at) for at in _VALUE.findall(meaning)), default=1) - 1


def _argument(name: str, arg: ArgSpec, value: object) -> object:
    """Return an argument in the form in which it is sent.

    Raises ContractError if the value does not have the declared type.
    """
    match arg.type, value:
        case "flag", bool():
            return int(value)
        case "int", int() if not isinstance(value, bool):
            return value
        case (("str" | "id" | "bytes"), (str() | bytes())):
            return value
        case "token", str() if value:
            return value
    raise ContractError(f"{name}: argument {arg.name} must be {arg.type}, not {value!r}")


def _directory() -> Path:
    """Return the directory of the scripts, either in the installed package or in a working copy."""
    package = Path(__file__).resolve().parent.parent
    packed = package / "_lua"
    return packed if packed.is_dir() else package.parent / "lua"


# --- lint: rules that every script must follow, which a test checks ------------------------------

_CALL = re.compile(r"(?:\bredis\.p?|(?<![.\w]))call\(\s*'(\w+)'(?:,\s*'([^']*)')?")
_RETURNED = re.compile(r"return\s*\{\s*'([A-Z_]+)'")
_ASSIGNED_WORD = re.compile(r"\.word = (?:body and )?'([A-Z]+)'(?: or '([A-Z]+)')?")
# In these commands, another word comes before the key.
_WORD_FIRST = frozenset({"MEMORY", "XGROUP", "XINFO", "XREADGROUP"})
_LONGEST = 100
# These commands do not change anything. Any other command counts as a write.
_READS = re.compile(
    r"EXISTS|GET|HEXISTS|HGET|HGETALL|HLEN|HMGET|MEMORY|PTTL|SCARD|STRLEN|TIME|XINFO|XLEN|XPENDING"
    r"|XRANGE|XREVRANGE|ZCARD|ZCOUNT|ZRANGE|ZRANGEBYSCORE|ZRANK|ZSCORE"
)


def lint(script: Script) -> list[str]:
    """Return a description of each rule that a script violates."""
    code = _without_comments(script.body)
    whole = _without_comments(script.source.decode())
    guards, line, effects = script.body.partition(f"\n{GUARDS_END}\n")
    problems = _lint_names(script, code)
    if {found[1] for found in _RETURNED.finditer(whole)} != {*script.values}:
        problems.append("the words returned are not those of the header")
    in_items = {word for pair in _ASSIGNED_WORD.findall(whole) for word in pair if word}
    if in_items != set(script.entry_returns):
        problems.append("the words for entries are not those of the header")
    writers = _writers(whole)
    if _writes(_without_comments(guards), writers):
        problems.append("a write before the guards end")
    if bool(line) != _writes(_without_comments(effects), writers):
        problems.append("a line where guards end belongs to scripts that write, and only to them")
    if re.search(r"\btostring\b|\bmath\.random\b|\bloadstring\b|\bredis\.log\b", whole):
        problems.append("tostring, random, loadstring or log")
    if any(found[2] and found[1] not in _WORD_FIRST for found in _CALL.finditer(whole)):
        problems.append("a key that is not among KEYS")
    if "cjson" in whole and not script.name.startswith("member_"):
        problems.append("JSON is not decoded in scripts")
    if script.source.startswith(b"#!"):
        problems.append("a shebang: Redis 6.2 cannot compile it")
    length = max(len(text) for text in script.source.decode().split("\n"))
    if length > _LONGEST:
        problems.append(f"a line of {length} characters")
    return problems


def _lint_names(script: Script, code: str) -> list[str]:
    """Check that a script uses each declared key and argument, and names a local variable after it.

    Return the problems found.
    """
    problems = []
    keys = [(key.name, False) for key in script.keys]
    args = [(arg.name, arg.type == "list") for arg in script.args]
    for table, declared in (("KEYS", keys), ("ARGV", args)):
        used = {int(number) for number in re.findall(rf"\b{table}\[(\d+)\]", code)}
        if used != {at for at, (_, many) in enumerate(declared, 1) if not many}:
            problems.append(f"{table} used are not those declared")
        problems += [
            f"{table} {name} has no local of its name"
            for name, _ in declared
            if not re.search(rf"^local\b[^=]*\b{name}\b[^=]*=", code, re.MULTILINE)
        ]
    return problems


def _writers(code: str) -> list[str]:
    """Return the names of the local functions that execute a write command."""
    blocks = re.findall(r"^local function (\w+)(.*?)^end$", code, re.MULTILINE | re.DOTALL)
    return [name for name, block in blocks if _writes(block, [])]


def _writes(code: str, writers: Sequence[str]) -> bool:
    if any(not _READS.fullmatch(found[1]) for found in _CALL.finditer(code)):
        return True
    return any(re.search(rf"\b{name}\(", code) for name in writers)


def _without_comments(code: str) -> str:
    return re.sub(r"--[^\n]*", "", code)
