"""Memory as rows of the problem: what lives on a device at one point of the program.

    bytes_r(x)  =  constant_r  +  sum_v nodes_r[v][x_v]  +  sum_e edges_r[e][gu(x_u), gv(x_v)]            -> Row.value
    peak(x)     =  max_r bytes_r(x)                                                                       -> RowSource

A program has some 10^4 points, of which a few can be the peak, so rows come lazily: a problem with some of its rows is
a relaxation of the problem with all, its bounds hold, and a plan counts only when `RowSource.peak` says that it fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from autopar.ir.problem import Floats, Ints, Problem


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """What lives at one program point: constant + sum over nodes and edges, in bytes per device.

    Attributes:
        name: the program point, for people; rows with equal names are the same row.
        constant: bytes that no decision changes.
        nodes: node index -> bytes per strategy, shape (len(node.cost),).
        edges: edge index -> bytes per pair of classes, the shape of edge.table.
    """

    name: str
    constant: float
    nodes: Mapping[int, Floats]
    edges: Mapping[int, Floats]

    def value(self, problem: Problem, assignment: Ints) -> float:
        """Bytes per device of one full assignment (strategy index per node), shape (nodes,)."""
        nodes = sum(float(b[assignment[v]]) for v, b in self.nodes.items())
        ends = ((problem.edges[e], b) for e, b in self.edges.items())
        return self.constant + nodes + sum(float(b[e.gu[assignment[e.u]], e.gv[assignment[e.v]]]) for e, b in ends)


def weighted_sum(name: str, *terms: tuple[float, Row]) -> Row:
    """The row of the sum of (weight, row) terms; an absent table counts as zero."""
    constant = sum(weight * row.constant for weight, row in terms)
    nodes = _sum_of_tables([(weight, row.nodes) for weight, row in terms])
    edges = _sum_of_tables([(weight, row.edges) for weight, row in terms])
    return Row(name, constant, nodes, edges)


def _sum_of_tables(terms: Sequence[tuple[float, Mapping[int, Floats]]]) -> dict[int, Floats]:
    """The weighted sum of tables by index."""
    total: dict[int, Floats] = {}
    for weight, tables in terms:
        for index, table in tables.items() if weight else ():
            total[index] = total[index] + weight * table if index in total else weight * table
    return dict(sorted(total.items()))


def smallest(row: Row) -> float:
    """Bytes at one program point if each tensor there is as small as it can be; no plan's peak is below."""
    return row.constant + sum(float(t.min()) for t in (*row.nodes.values(), *row.edges.values()))


def even_share(row: Row, devices: int) -> float:
    """Bytes at one program point if no device has more than its share of any tensor; no mesh has a plan below it."""
    tensors = (*row.nodes.values(), *row.edges.values())
    return row.constant / devices + sum(min(float(t.min()), float(t.max()) / devices) for t in tensors)


class RowSource(Protocol):
    """The memory model of one problem: every program point, of which rows are made as they are needed.

    Assignments, node and edge indices are those of the unfolded problem that the source was made for.
    """

    def peak(self, assignment: Ints) -> tuple[float, Row]:
        """The exact peak (bytes per device) of a full assignment, and the row of the point where it is reached."""
        ...

    def over(self, assignment: Ints, nbytes: float) -> Sequence[Row]:
        """The rows of a full assignment's highest points above so many bytes, the highest first; a few.

        A plan that holds too much often does so in every layer: one row at a time would meet them one by one.
        """
        ...

    def rows(self) -> Sequence[Row]:
        """A few likely peak points to start with; may be empty."""
        ...
