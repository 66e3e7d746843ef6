"""Compute how many assignments of each topic and group every instance should own.

Rows are members, columns are (topic, group)s. Both are sorted by name, so
names break ties. `assignment` calls this module for each connected part.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

Table = list[list[int]]


@dataclass(slots=True)
class Part:
    """A connected component of members and the assignments that they offer to run, as counts."""

    weights: list[int]  # weight of each row
    caps: list[int | None]  # most assignments of each row
    offers: list[list[int]]  # columns that each row offers
    held: Table  # owned assignments by row and column, where the row offers the column
    free: list[int]  # assignments without an owner, by column
    fixed: list[int]  # assignments of each row that are outside all columns and do not move
    loads: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.loads = [sum(row) + fixed for row, fixed in zip(self.held, self.fixed, strict=True)]

    def room(self, row: int) -> int | None:
        """Return how many more assignments a row may take, None without a cap."""
        cap = self.caps[row]
        return None if cap is None else cap - self.loads[row]

    def is_full(self, row: int) -> bool:
        """Return True if a row may take no more assignments."""
        cap = self.caps[row]
        return cap is not None and self.loads[row] >= cap

    def shift(self, row: int, column: int, by: int) -> None:
        """Add `by` assignments of a column to a row. A negative number removes assignments."""
        self.held[row][column] += by
        self.loads[row] += by


def balance(part: Part) -> Table:
    """Return counts by row and column, balanced as `assignment` describes."""
    columns = len(part.free)
    if all(len(offered) == columns for offered in part.offers) and not any(part.fixed):
        _balance_complete(part)
    else:
        _balance_partial(part)
    return part.held


# --- every row offers every column ------------------------------------------------------------


def _balance_complete(part: Part) -> None:
    total = sum(part.loads) + sum(part.free)
    wanted = shares(part.weights, part.caps, part.loads, total)
    for row, want in enumerate(wanted):
        _release(part, row, part.loads[row] - want)
    lacking = [want - load for want, load in zip(wanted, part.loads, strict=True)]
    # With caps there may be more free assignments than room. Then each column gets its part of the
    # room.
    dealt = shares(part.free, list(part.free), [0] * len(part.free), sum(lacking))
    for column, count in enumerate(dealt):
        _deal_column(part, column, count, lacking)


def shares(
    weights: list[int], caps: list[int | None] | list[int], current: list[int], total: int
) -> list[int]:
    """Divide `total` by weight into integers, each within its cap. An excess is left out.

    Each index gets its share rounded down, or one more. An index whose `current` count already
    exceeds its share is the first to get one more, then those with the largest remainders. A weight
    of 0 has no share.
    """
    result = [0] * len(weights)
    active = [index for index, weight in enumerate(weights) if weight > 0]
    while active:
        weight = sum(weights[index] for index in active)
        capped = [
            index
            for index in active
            if (cap := caps[index]) is not None and cap * weight <= total * weights[index]
        ]
        if not capped:
            break
        for index in capped:
            result[index] = caps[index] or 0
            total -= result[index]
        active = [index for index in active if index not in set(capped)]
    if not active:
        return result
    weight = sum(weights[index] for index in active)
    remainders: list[tuple[bool, int, int]] = []
    for index in active:
        result[index], remainder = divmod(total * weights[index], weight)
        if remainder:
            remainders.append((current[index] <= result[index], -remainder, index))
    over = total - sum(result[index] for index in active)
    for _, _, index in sorted(remainders)[:over]:
        result[index] += 1
    return result


def _release(part: Part, row: int, count: int) -> None:
    """Free `count` assignments of a row, from the columns in which it exceeds its share most."""
    if count <= 0:
        return
    weight, weights = part.weights[row], sum(part.weights)
    sizes = _sizes(part)
    held = part.held[row]
    surplus = [
        (sizes[column] * weight - held[column] * weights, column) for column in part.offers[row]
    ]
    heapq.heapify(surplus)
    while count:
        key, column = surplus[0]
        if not held[column]:
            heapq.heappop(surplus)
            continue
        heapq.heapreplace(surplus, (key + weights, column))
        part.shift(row, column, -1)
        part.free[column] += 1
        count -= 1


def _sizes(part: Part) -> list[int]:
    return [free + sum(row[column] for row in part.held) for column, free in enumerate(part.free)]


def _deal_column(part: Part, column: int, count: int, lacking: list[int]) -> None:
    """Deal free assignments of a column to rows that lack some, fewest in the column first."""

    def key(row: int) -> tuple[float, float, int]:
        weight = part.weights[row]
        return (2 * part.held[row][column] + 1) / weight, -lacking[row] / weight, row

    queue = [key(row) for row, lack in enumerate(lacking) if lack > 0]
    heapq.heapify(queue)
    for _ in range(count):
        row = heapq.heappop(queue)[2]
        part.shift(row, column, 1)
        part.free[column] -= 1
        lacking[row] -= 1
        if lacking[row]:
            heapq.heappush(queue, key(row))


# --- offers differ ----------------------------------------------------------------------------
#
# A move from one row to another is an improvement if the giver saves more than the taker pays: (2 *
# load - 1) / weight > (2 * load + 1) / weight. With equal weights, that is a difference of two
# assignments. In general it lowers the sum of load² / weight, so the improvements are finite.
# Quotients of small integers compare exactly as floats: equal ones are equal.


def _saving(part: Part, row: int) -> float:
    return (2 * part.loads[row] - 1) / part.weights[row]


def _cost(part: Part, row: int) -> float:
    return (2 * part.loads[row] + 1) / part.weights[row]


def _balance_partial(part: Part) -> None:
    offerers: Table = [[] for _ in part.free]
    for row, offered in enumerate(part.offers):
        cap = part.caps[row]
        if cap is not None:
            _release(part, row, min(part.loads[row] - cap, sum(part.held[row])))
        for column in offered:
            offerers[column].append(row)
    # Start with columns that few rows offer. The others can still be dealt around them.
    for column in sorted(range(len(part.free)), key=lambda column: len(offerers[column])):
        _fill_column(part, column, offerers[column])
    for column in range(len(part.free)):
        while part.free[column] and _make_room(part, column, offerers):
            part.free[column] -= 1
    if not _is_even(part):
        _move_directly(part, offerers)
    while not _is_even(part) and _move_along_chain(part, offerers):
        pass


def _is_even(part: Part) -> bool:
    """Return True if no move at all would be an improvement, regardless of offers."""
    rows = range(len(part.loads))
    saved = max(
        (_saving(part, row) for row in rows if part.loads[row] > part.fixed[row]), default=0
    )
    return all(_cost(part, row) >= saved or part.is_full(row) for row in rows)


def _fill_column(part: Part, column: int, offerers: list[int]) -> None:
    """Deal free assignments of a column to the least loaded rows, fewest in the column first."""

    def key(row: int) -> tuple[float, float, int]:
        return _cost(part, row), part.held[row][column] / part.weights[row], row

    queue = [key(row) for row in offerers if not part.is_full(row)]
    heapq.heapify(queue)
    while queue and part.free[column]:
        row = heapq.heappop(queue)[2]
        part.shift(row, column, 1)
        part.free[column] -= 1
        if not part.is_full(row):
            heapq.heappush(queue, key(row))


def _make_room(part: Part, column: int, offerers: Table) -> bool:
    """Place one free assignment although all offerers are full, by moving others away."""
    came: dict[int, tuple[int, int]] = {}  # row -> column through which it was reached, giver
    columns = {column}
    todo: list[tuple[int, int]] = [(column, -1)]
    while todo:
        through, giver = todo.pop(0)
        for row in offerers[through]:
            if row in came:
                continue
            came[row] = (through, giver)
            if not part.is_full(row):
                _shift_back(part, came, row)
                return True
            for held in part.offers[row]:
                if part.held[row][held] and held not in columns:
                    columns.add(held)
                    todo.append((held, row))
    return False


def _shift_back(part: Part, came: dict[int, tuple[int, int]], row: int) -> None:
    while row != -1:
        column, giver = came[row]
        part.shift(row, column, 1)
        if giver != -1:
            part.shift(giver, column, -1)
        row = giver


def _move_directly(part: Part, offerers: Table) -> None:
    """Move assignments from the most loaded rows directly to the least loaded rows that offer them.

    The giver is the row that saves most. After the move, its price equals that saving, which no
    other row exceeds, so it takes no assignment later. Prices therefore only rise, and a queue
    holds each taker once, with a price that is corrected when it is read.
    """
    prices = [_cost(part, row) for row in range(len(part.loads))]
    takers = [[(prices[row], row) for row in rows if not part.is_full(row)] for rows in offerers]
    for queue in takers:
        heapq.heapify(queue)
    givers = [(-_saving(part, row), row) for row in range(len(part.loads))]
    heapq.heapify(givers)
    floor = min((queue[0][0] for queue in takers if queue), default=math.inf)
    while givers and -givers[0][0] > floor:
        saved, giver = heapq.heappop(givers)
        if -saved != _saving(part, giver):
            continue  # its load has changed since
        best: tuple[float, float, int, int] | None = None
        held, weight = part.held[giver], part.weights[giver]
        for column in part.offers[giver]:
            taker = _find_cheapest(part, takers[column], prices) if held[column] else None
            if taker is None or prices[taker] >= -saved or (best and prices[taker] > best[0]):
                continue
            thinness = part.held[taker][column] / part.weights[taker]
            candidate = (prices[taker], thinness - held[column] / weight, column, taker)
            best = min(best, candidate) if best else candidate
        if best is None:
            continue
        _, _, column, taker = best
        part.shift(giver, column, -1)
        part.shift(taker, column, 1)
        for row in (giver, taker):
            prices[row] = _cost(part, row)
            heapq.heappush(givers, (-_saving(part, row), row))


def _find_cheapest(part: Part, queue: list[tuple[float, int]], prices: list[float]) -> int | None:
    """Return the row that pays least, from a queue of (earlier price, row)."""
    while queue:
        price, row = queue[0]
        if part.is_full(row):
            heapq.heappop(queue)
        elif price == prices[row]:
            return row
        else:
            heapq.heapreplace(queue, (prices[row], row))
    return None


def _move_along_chain(part: Part, offerers: Table) -> bool:
    """Make one improvement over rows between giver and taker. Return False if there is none.

    Takers are tried from the least loaded on. If a row can reach a taker and saves too little for
    it, it also saves too little for all later takers. So every row is visited once.
    """
    holders: Table = [
        [row for row in rows if part.held[row][column]] for column, rows in enumerate(offerers)
    ]
    seen_rows: set[int] = set()
    seen_columns: set[int] = set()
    for taker in sorted(range(len(part.loads)), key=lambda row: (_cost(part, row), row)):
        if taker in seen_rows or part.is_full(taker):
            continue
        seen_rows.add(taker)
        next_of: dict[int, tuple[int, int]] = {}  # giver -> column and row to give to
        todo = [taker]
        best = None
        while todo:
            row = todo.pop(0)
            for column in part.offers[row]:
                if column in seen_columns:
                    continue
                seen_columns.add(column)
                for holder in holders[column]:
                    if holder not in seen_rows:
                        seen_rows.add(holder)
                        next_of[holder] = (column, row)
                        todo.append(holder)
                        if best is None or _saving(part, holder) > _saving(part, best):
                            best = holder
        if best is not None and _saving(part, best) > _cost(part, taker):
            row = best
            while row != taker:
                column, following = next_of[row]
                part.shift(row, column, -1)
                part.shift(following, column, 1)
                row = following
            return True
    return False
