"""Random payloads of a schema. Most values have their type in an odd form, others do not."""

from __future__ import annotations

import datetime as dt
import json
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

_NUMBERS = (
    *("-0", "-0.0", "0", "0.0", "1E+5", "0E-7", "1e400", "16777217.0", "3.4028236e38", "1e-46"),
    *("0.00", "-1.005", "99999999.99", "99999999.995", "9007199254740993", "5e-324", "1.50"),
)
_STRINGS = (
    *("", " ", "now", "T10:00", "2026", "2026-01", "2026-10-01T00:30:00GMT+3", "NaN", "+INF"),
    *("x", "ä \U0001f600", "\x00", "a\tb", "2025-11-20T10:00:60Z", "2025-11-20t10:00:00z"),
    *("2025-02-29", "2024-02-29", "1900-02-29", "2000-02-29", "0000-01-01", "0001-01-01"),
    *("2025-11-20T10:00:00+18:00", "2025-11-20T10:00:00-17:59", "2025-11-20T24:00:00Z"),
    *(" 2025-11-20", "2025-11-20 ", "2025-11-20\n", "2025-11-20T10:00:00Z\n", "12:00", "1.5\n"),
)
_SYMBOLS = ("true", "false", "null", "[]", "{}", "[{}]")


class AnyPayload:
    """Makes random payloads. Generators with equal seeds make equal payloads."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def payload(self, schema: StructType) -> bytes:
        """Return a payload. Some have an extra field, a repeated field, or text beyond JSON."""
        some = self._chance.sample(schema.fields, self._chance.randint(1, 3))
        fields = [f'"{each.name}":{self._space()}{self.value(each.dataType, 0.9)}' for each in some]
        if self._chance.random() < 0.2:
            fields.append(f'"other": {self._any(3)}')
        if fields and self._chance.random() < 0.02:
            fields.append(self._chance.choice(fields))
        tail = self._chance.choice(["\n", " x", ","]) if self._chance.random() < 0.03 else ""
        return (f"{{{', '.join(fields)}}}" + tail).encode()

    def value(self, kind: DataType, typed: float) -> str:
        """Return the JSON text of a value. `typed` is the probability that it has the type."""
        if self._chance.random() > typed:
            return self._any(2)
        name = kind.typeName().partition("(")[0]
        if name == "struct":
            some = [each for each in kind.fields if self._chance.random() < 0.7]  # type: ignore[attr-defined]
            inner = (f'"{each.name}": {self.value(each.dataType, 0.95)}' for each in some)
            return f"{{{', '.join(inner)}}}"
        if name == "array":
            count = self._chance.randint(0, 3)
            items = (self.value(kind.elementType, 0.95) for _ in range(count))  # type: ignore[attr-defined]
            return f"[{', '.join(items)}]"
        if name == "map":
            return f'{{"a": {self.value(kind.valueType, 0.95)}}}'  # type: ignore[attr-defined]
        return self._one_of(*_MAKERS.get(name, (AnyPayload._integer,)))

    def _one_of(self, *makers: Callable[[AnyPayload], str]) -> str:
        return self._chance.choice(makers)(self)

    def _any(self, depth: int) -> str:
        if depth and self._chance.random() < 0.3:
            items = [self._any(depth - 1) for _ in range(self._chance.randint(0, 2))]
            if self._chance.random() < 0.5:
                return f"[{','.join(items)}]"
            names = self._chance.sample(["n", "at", "a", "name"], len(items))
            pairs = zip(names, items, strict=True)
            return f"{{{','.join(f'{json.dumps(name)} : {each}' for name, each in pairs)}}}"
        makers = (AnyPayload._integer, AnyPayload._decimal, AnyPayload._time, AnyPayload._string)
        return self._one_of(*makers, AnyPayload._symbol)

    def _space(self) -> str:
        return self._chance.choice(["", " ", " ", "\n "])

    def _digits(self, most: int) -> str:
        return "".join(self._chance.choices("0123456789", k=self._chance.randint(1, most)))

    def _integer(self) -> str:
        bits = self._chance.choice([4, 7, 15, 16, 31, 32, 44, 63, 64, 70])
        return str(self._chance.randint(-(1 << bits), 1 << bits))

    def _decimal(self) -> str:
        if self._chance.random() < 0.2:
            return self._chance.choice(_NUMBERS)
        if self._chance.random() < 0.3:
            return repr(self._chance.uniform(-1, 1) * 10 ** self._chance.randint(-40, 40))
        sign = self._chance.choice(["", "", "-"])
        whole = str(int(self._digits(self._chance.choice([2, 8, 9, 25]))))
        fraction = "." + self._digits(self._chance.choice([2, 3, 20]))
        exponent = self._chance.choice(["", "", "", f"e{self._digits(2)}", f"E-{self._digits(2)}"])
        return sign + whole + self._chance.choice(["", fraction, fraction]) + exponent

    def _quoted_number(self) -> str:
        text = self._decimal()
        if self._chance.random() < 0.1:
            text = self._chance.choice(["+", "0", "00", " "]) + text
        return json.dumps(text)

    def _time(self) -> str:
        moment = dt.datetime(2000, 1, 1, tzinfo=dt.UTC) + dt.timedelta(
            days=self._chance.choice([self._chance.randint(-700_000, 2_900_000), 9_000]),
            microseconds=self._chance.randint(0, 86_399_999_999),
        )
        text = moment.strftime("%Y").zfill(4) + moment.strftime("-%m-%d")
        if self._chance.random() < 0.1:
            year = self._chance.choice(["2024", "2023", "1900", "2000", "9999", "10000", "-0044"])
            text = f"{year}-{self._chance.randint(0, 13):02}-{self._chance.randint(0, 32):02}"
        if self._chance.random() < 0.7:
            text += self._chance.choice("TTT tx") + moment.strftime("%H:%M:%S")
            text += self._chance.choice(["", "", f".{self._digits(9)}", f".{self._digits(3)}", ","])
            text += self._chance.choice(
                ["", "Z", "Z", "+01:00", "-09:30", "+0100", "+01", "z", "UTC", " UTC", "-00:00",
                 "+18:01", "Europe/Berlin"]
            )  # fmt: skip
        return json.dumps(text)

    def _string(self) -> str:
        some: Sequence[str] = self._chance.choice([_STRINGS, _STRINGS, _NUMBERS])
        return json.dumps(self._chance.choice(some), ensure_ascii=self._chance.random() < 0.5)

    def _symbol(self) -> str:
        return self._chance.choice(_SYMBOLS)


_MAKERS: dict[str, tuple[Callable[[AnyPayload], str], ...]] = {
    "string": (AnyPayload._string, AnyPayload._time, AnyPayload._integer, AnyPayload._decimal),
    "boolean": (AnyPayload._symbol,),
    "double": (AnyPayload._decimal, AnyPayload._decimal, AnyPayload._integer),
    "float": (AnyPayload._decimal, AnyPayload._decimal, AnyPayload._integer),
    "decimal": (AnyPayload._decimal, AnyPayload._quoted_number, AnyPayload._integer),
    "date": (AnyPayload._time, AnyPayload._time, AnyPayload._string),
    "timestamp": (AnyPayload._time, AnyPayload._time, AnyPayload._string, AnyPayload._integer),
}
