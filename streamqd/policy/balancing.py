"""Compute how many assignments of each topic and group every instance should own.

All tables have a row for each member and a column for each (topic, group). Both are sorted by name,
so that names break ties. `assignment` divides a fleet into parts that have no offers in common, and
calls this module for each part.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

Table = list[list[int]]


@dataclass(slots=True)
class Part:
    """Members that are connected by common offers, and the numbers of assignments they can own."""

    weights: list[int]  # weight of each row
    caps: list[int | None]  # maximum number of assignments of each row, None for no limit
    offers: list[list[int]]  # the columns that each row offers
    held: Table  # number of owned assignments by row and column, 0 if the row does not offer it
    free: list[int]  # number of assignments without an owner in each column
    fixed: list[int]  # number of assignments of each row that are in no column and do not move
    loads: list[int] = field(init=False)  # total number of assignments of each row

    def __post_init__(self) -> None:
        self.loads = [sum(row) + fixed for row, fixed in zip(self.held, self.fixed, strict=True)]

    def room(self, row: int) -> int | None:
        """Return how many more assignments a row may take, or None if it has no cap."""
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
    """Return the balanced counts by row and column, with the properties listed in `assignment`."""
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
    # Because of caps, there may be more free assignments than room. The room is then divided among
    # the columns.
    dealt = shares(part.free, list(part.free), [0] * len(part.free), sum(lacking))
    for column, count in enumerate(dealt):
        _deal_column(part, column, count, lacking)


def shares(
    weights: list[int], caps: list[int | None] | list[int], current: list[int], total: int
) -> list[int]:
    """Divide `total` into integer shares that are proportional to the weights.

    No share exceeds its cap. If all caps are reached, the rest of the total is not distributed.
    Each index gets its exact share rounded down, or one more. Indexes whose `current` count already
    exceeds their share get one more first, and then those with the largest remainders. An index
    with weight 0 gets nothing.
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
    """Deal `count` free assignments of a column to the rows that lack assignments.

    The row with the fewest assignments in this column is served first.
    """

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
# Moving an assignment from one row (the giver) to another (the taker) is an improvement if the
# giver saves more than the taker pays. The giver saves (2 * load - 1) / weight, and the taker pays
# (2 * load + 1) / weight. With equal weights, this means that their loads differ by at least two
# assignments. Each improvement lowers the sum of load² / weight, so the algorithm always finishes.
# Savings and costs can be compared as floats, because equal quotients of small integers are exactly
# equal.


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
    # Start with the columns that few rows offer. The other columns can be placed on more rows, so
    # they can even out the loads afterwards.
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
    """Return True if no move would be an improvement, even if every row offered every column."""
    rows = range(len(part.loads))
    saved = max(
        (_saving(part, row) for row in rows if part.loads[row] > part.fixed[row]), default=0
    )
    return all(_cost(part, row) >= saved or part.is_full(row) for row in rows)


def _fill_column(part: Part, column: int, offerers: list[int]) -> None:
    """Deal the free assignments of a column to the least loaded rows that offer it.

    If rows are equally loaded, the one with the fewest assignments in this column is served first.
    """

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
    """Place one free assignment of a column whose rows are all full, by moving others away.

    The search follows chains of moves from row to row until it reaches a row that is not full.
    Return False if there is no such chain.
    """
    # For each row, the column through which the search reached it, and the row that gives.
    came: dict[int, tuple[int, int]] = {}
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

    The giver is always the row that saves most. After the move, its cost to take an assignment back
    equals what it saved, and no other row saves more than that, so it never becomes a taker. The
    costs of takers therefore only rise, and a queue needs to contain each taker only once. Its cost
    is corrected when it is read.
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
            continue  # the load of the row has changed since it was queued
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
    """Return the row with the lowest cost from a queue of pairs (cost, row), without removing it.

    Costs in the queue may be too low, and are then corrected from `prices`. Full rows are removed
    from the queue. Return None if it becomes empty.
    """
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
    """Make one improvement by a chain of moves through other rows. Return False if there is none.

    Takers are tried in order of their cost, starting with the lowest. If a row can reach a taker
    but saves less than this taker pays, it also saves less than all later takers pay. Every row
    therefore has to be visited only once.
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
        next_of: dict[int, tuple[int, int]] = {}  # column and receiving row for each giver
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
