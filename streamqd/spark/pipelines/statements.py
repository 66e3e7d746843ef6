"""Scan Spark SQL as text, to find passwords and the ends of statements."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import dropwhile

from streamqd.config.secrets import has_password
from streamqd.errors import InvalidRequestError, RequestRefusedError

# The pattern that ends each kind of piece of SQL: plain SQL (''), literals, names and comments.
_STOPS = {
    "": re.compile(r"""/\*(?!\+)|--|(?<!\w)[rR]['"]|['"`;]"""),  # /*+ is a hint, not a comment
    "'": re.compile(r"\\.|'", re.DOTALL),
    '"': re.compile(r'\\.|"', re.DOTALL),
    "r'": re.compile("'"),
    'r"': re.compile('"'),
    "`": re.compile("`"),
    "--": re.compile(r"\\\n|[\r\n]"),
    "/*": re.compile(r"/\*(?!\+)|\*/"),
}
_COMMENTS = ("--", "/*")
_LITERALS = ("'", '"', "r'", 'r"')
_URL = re.compile(r"(?:rediss?|unix)(?:\+\w+)?://", re.IGNORECASE)
_WORD = re.compile(r"\S+")
_TOKEN = re.compile(r"\w+|\S")
_COLUMNS = re.compile(
    r"create (?:or replace )?table (?:if not exists )?\S+(?: \. \S+)* \(.*\) using streamq\b"
)
_JOINS = re.compile(r"[\s|]*")
_ARGUMENTS = re.compile(r"[\s|,]*")
_CONCAT = re.compile(r"\bconcat\s*\(\s*$", re.IGNORECASE)  # call whose arguments are joined
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([01][0-7]{2})|(.))", re.DOTALL)


class SqlScanner:
    """Cuts SQL into pieces: plain SQL, literals, quoted names and comments.

    Pass the SQL either as a whole, or line by line including line breaks. Cutting within a line
    could separate characters that belong together, such as `--`.
    """

    def __init__(self) -> None:
        self.inside = ""  # a key of _STOPS
        self._depth = 0  # nesting depth of comments

    def pieces(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield the pieces of a text, each preceded by its kind: a key of _STOPS, or `;`."""
        begin = at = 0
        while stop := _STOPS[self.inside].search(text, at):
            at = stop.end()
            kind = self.inside
            if not self._turn(stop[0]):
                continue
            end = at if kind else stop.start()
            yield kind, text[begin:end]
            begin = end
            if stop[0] == ";" and not kind:
                yield ";", ";"
                begin = at
        yield self.inside, text[begin:]

    def _turn(self, stop: str) -> bool:
        """Record the kind of the next piece. Return True if the current piece ends here."""
        if not self.inside:
            self.inside = "" if stop == ";" else stop.lower()
            self._depth = 1
            return True
        if stop[0] == "\\":
            return False
        self._depth += 1 if stop == "/*" else -1
        if self._depth:
            return False
        self.inside = ""
        return True


class SqlSplitter:
    """Cuts lines of SQL into statements. Each line is scanned only once."""

    def __init__(self) -> None:
        self._scanner = SqlScanner()
        self._begin()

    def _begin(self) -> None:
        self._pieces: list[str] = []
        self._blank = True  # True while the statement has only spaces and comments
        self.begun = False  # False while the statement has only spaces

    def add(self, line: str) -> list[str]:
        """Add a line, including its line break. Return the statements that the line completes."""
        done: list[str] = []
        for kind, piece in self._scanner.pieces(line):
            if kind == ";":
                if not self._blank:
                    done.append("".join(self._pieces).strip())
                self._begin()
                continue
            self._pieces.append(piece)
            if piece.strip():
                self.begun = True
                self._blank = self._blank and kind in _COMMENTS
        return done

    def remainder(self) -> str:
        """Return the unfinished statement. If it consists only of closed comments, return ''."""
        closed = self._scanner.inside != "/*"
        return "" if self._blank and closed else "".join(self._pieces).strip()


def check(statement: str) -> None:
    """Raise an error if Spark cannot read a statement, or if it would expose a Redis password.

    Raises InvalidRequestError if the statement is not UTF-8. Raises RequestRefusedError if it
    contains a Redis password, because Spark shows statements on its pages and stores them in
    checkpoints. Strings that functions build cannot be checked, except for `concat` of literals, so
    the URL of a table must be a literal. A table USING streamq must have no columns.
    """
    try:
        statement.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError("the statement is not UTF-8 (convert it with iconv)") from None
    if any(map(_has_password, _texts(statement))):
        raise RequestRefusedError(
            "the statement contains a password, which Spark would show on its pages; use"
            " passwordFile, $STREAMQ_URL or streamq.toml"
        )
    if _has_columns(statement):
        raise RequestRefusedError(
            "a table USING streamq has the columns of its topic; write CREATE TABLE name USING"
            " streamq OPTIONS (topic 'orders'), without columns"
        )
    if _has_made_url(statement):
        raise RequestRefusedError(
            "the url of the table is an expression, and Spark would show a password in it on its"
            " pages; write one literal, or use $STREAMQ_URL or streamq.toml"
        )


def _has_columns(statement: str) -> bool:
    """Return True for a CREATE TABLE … USING streamq with columns, which Spark would accept."""
    words = " ".join(text if kind == "" else "'" for kind, text in _tokens(statement))
    return _COLUMNS.match(words) is not None


def _has_made_url(statement: str) -> bool:
    """Return True for a CREATE TABLE … USING streamq whose URL is not a literal."""
    tokens = list(_tokens(statement))
    words = " ".join(text if kind == "" else "'" for kind, text in tokens)
    if "using streamq" not in words or ("", "options") not in tokens:
        return False
    first = tokens.index(("", "options"))
    for at in range(first + 1, len(tokens)):
        if tokens[at][1] == "url" and tokens[at - 1] in (("", "("), ("", ",")):
            value = tokens[at + 1 :]
            value = value[1:] if value[:1] == [("", "=")] else value
            behind = list(dropwhile(lambda token: token[0] == "'", value))
            if behind == value or behind[:1] not in ([("", ",")], [("", ")")], []):
                return True
    return False


def _tokens(statement: str) -> Iterator[tuple[str, str]]:
    """Yield the words, signs and literals of a statement in lower case, each preceded by its kind.

    The kind is `'` for a literal and '' for anything else.
    """
    for kind, piece in SqlScanner().pieces(statement):
        if kind in _LITERALS:
            yield "'", _value(kind, piece).lower()
        elif kind == "`":
            yield "", piece.strip("`").lower()
        elif kind not in _COMMENTS:
            yield from (("", word.lower()) for word in _TOKEN.findall(piece))


def _has_password(text: str) -> bool:
    return any(has_password(text[found.start() :]) for found in _URL.finditer(text))


def _texts(statement: str) -> Iterator[str]:
    """Yield the values of literals, joining adjacent ones as Spark does, and all other words."""
    joined: list[str] = []
    between = _JOINS
    for kind, piece in SqlScanner().pieces(statement):
        if kind in _LITERALS:
            joined.append(_value(kind, piece))
            continue
        if kind not in _COMMENTS and not between.fullmatch(piece):
            yield "".join(joined)
            joined = []
            between = _ARGUMENTS if _CONCAT.search(piece) else _JOINS
        yield from _WORD.findall(piece)
    yield "".join(joined)


def _value(kind: str, literal: str) -> str:
    text = literal[len(kind) :].removesuffix(kind[-1])
    return text if kind[0] == "r" else _ESCAPE.sub(_character, text)


def _character(found: re.Match[str]) -> str:
    for digits, base in ((found[1] or found[2], 16), (found[3], 8)):
        if digits:
            code = int(digits, base)
            return chr(code) if code < 0x110000 else "?"
    return str(found[4])
