"""One turn of the search for the cheapest plan within a budget.

    tied     equal layers alike: prices, pool, descent, rows learnt until the best plan truly fits          -> _tied
    bound    folding respects the rows that have a price: a bound on all plans, plans that tell layers apart -> _bound
    mix      layers part ways between plans that fit and cheaper ones that do not     passes/memory/symmetry_breaking.py
    deepen   a longer ascent, where the short one left a gap                                               -> _deepen
    explore  a search tree over plans that treat equal layers alike, for the plans and not the bound      -> _explore
    branch   on decisions that stand for themselves; of few layers each decision does  passes/memory/branch_and_bound.py

Each step runs only if those before left more than the target. How long a step takes is counted in changes of prices and
tree nodes, never by the clock, so that only the deadline can make two runs differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.memory.row import Row
from autopar.ir.problem import Floats, Ints
from autopar.passes.memory.branch_and_bound import MOST, Tree
from autopar.passes.memory.lagrangian import Dual, Messages, Pool, Within, ascend
from autopar.passes.memory.local_search import Swapper
from autopar.passes.memory.presolve import Core, Folding, narrowed, presolve
from autopar.passes.memory.search_state import CLOSED, Hunt
from autopar.passes.memory.symmetry_breaking import hubs, mix, polish

ROUNDS = 20  # of learning rows with equal layers alike
DESCENTS = 6  # plans of the pool that descent starts from
OFFERS = 4  # plans of one pool that are judged exactly before rows are learnt
SETTLE = 4  # passes at the best prices before strategies are ruled out
KEPT = 0.75  # share of the strategies that may be left for another turn with the rest
EXPLORED = 12  # tree nodes of a search for plans that treat equal layers alike
WORK, PER_NODE, FEWEST = 100_000, 8, 10  # what all tree nodes visit: strategies, and a decision as some; tree nodes
LONG: Mapping[str, Any] = {"changes": 150, "patience": 25, "enough": 0.05, "adapt": True, "scan": False}


def search(hunt: Hunt, how: Folding, few: bool, *, full: bool) -> None:
    """One turn of everything but the ILP, with the rows known; `few` layers are told apart one by one if need be."""
    core, pool, dual, messages = _tied(hunt, how, full=full)
    rows, apart = hunt.rows[: len(dual.prices)], not core.alike
    if apart:
        hunt.bound(dual.lower + core.constant, rows, dual.prices.tolist())
    if hunt.done:
        return
    tied = core, pool, dual, messages
    if not apart:
        core, pool, dual, messages, rows = _bound(hunt, rows, dual, "bound", full=full)
        mix(hunt, core, pool, rows, dual.prices)
    if hunt.done:
        return
    if few:
        if not apart:
            _explore(hunt, *tied)
        core, pool, dual, messages, rows = _bound(hunt, rows, dual, "none", full=full, patient=True)
    else:
        dual = _deepen(hunt, core, pool, dual, messages, rows)
        core, pool, dual, messages = _narrow(hunt, core, pool, dual, messages, rows)
    if not hunt.done:
        _branch_and_mix(hunt, core, pool, dual, messages, rows, apart or few)


def _branch_and_mix(
    hunt: Hunt, core: Core, pool: Pool, dual: Dual, messages: Messages, rows: list[Row], apart: bool
) -> None:
    """Branch on decisions that stand for themselves; plans met on the way are mixed."""
    branchable = core.counts == 1 if apart else (core.counts == 1) & hubs(hunt.problem)[core.first]
    lower, pairs = _branch(hunt, core, pool, dual, messages, branchable)
    hunt.bound(lower + core.constant, rows, dual.prices.tolist())
    if not hunt.done:
        mix(hunt, core, pool, rows, dual.prices, pairs)
    if not hunt.done:
        polish(hunt)


def _explore(hunt: Hunt, core: Core, pool: Pool, dual: Dual, messages: Messages) -> None:
    """Plans that treat equal layers alike, by a search of their own; its bounds are on such plans only."""
    dual = _deepen(hunt, core, pool, dual, messages)
    if not hunt.late:
        _branch(hunt, core, pool, dual, messages, core.counts > 0, EXPLORED)


def _branch(
    hunt: Hunt, core: Core, pool: Pool, dual: Dual, messages: Messages, branchable: NDArray[np.bool_], most: int = MOST
) -> tuple[float, list[tuple[Ints, Ints]]]:
    """The bound (s) of a search tree and the pairs of plans met; what fits is offered."""
    problem = core.loaded.problem
    able = WORK // (problem.variables + PER_NODE * len(problem.nodes))
    most = min(most, max(FEWEST, able))
    tree = Tree(messages, pool, hunt.budget, branchable)
    lower = tree.run(dual, hunt.seconds - core.constant, hunt.target / 2, hunt.deadline, most)
    _offer(hunt, core, pool)
    return lower, tree.pairs


def _start(hunt: Hunt, core: Core) -> Pool:
    """A pool of the plans known, as far as the core has them."""
    pool = Pool(core.loaded)
    plans = [core.project(a) for a in ([] if hunt.plan is None else [hunt.plan]) + hunt.seen]
    pool.add(plan for plan in plans if plan is not None)
    return pool


def _tied(hunt: Hunt, how: Folding, *, full: bool) -> tuple[Core, Pool, Dual, Messages]:
    """Rounds of ascent, descent and judgement until no row is new."""
    rounds = 0
    while True:
        core = presolve(hunt.problem, hunt.rows, how, full=full)
        pool, messages = _start(hunt, core), Messages(core.loaded, core.counts)
        aim = Within(core.loaded, hunt.budget, pool, hunt.seconds - core.constant)
        dual = _ascend(hunt, messages, pool, aim)
        _descend(hunt, core, pool, dual)
        known = len(hunt.rows)
        _offer(hunt, core, pool)
        rounds += 1
        if len(hunt.rows) == known or hunt.late or rounds == ROUNDS:
            return core, pool, dual, messages


def _bound(
    hunt: Hunt, rows: list[Row], dual: Dual, how: Folding, *, full: bool, patient: bool = False
) -> tuple[Core, Pool, Dual, Messages, list[Row]]:
    """A bound on all plans from the rows that have a price."""
    priced = [r for r in range(len(dual.prices)) if dual.prices[r] > 0] or [0]
    rows, prices = [rows[r] for r in priced], dual.prices[priced]
    core = presolve(hunt.problem, rows, how, full=full)
    return *_narrow(hunt, *_ascended(hunt, core, prices, rows, patient), rows, patient), rows


def _narrow(
    hunt: Hunt, core: Core, pool: Pool, dual: Dual, messages: Messages, rows: list[Row], patient: bool = False
) -> tuple[Core, Pool, Dual, Messages]:
    """The same without the strategies that no better plan takes, as long as that is many."""
    while not hunt.done:
        keep = _affordable(hunt, core, dual, messages)
        if sum(map(len, keep)) > KEPT * core.loaded.problem.variables:
            break
        core = narrowed(core, messages.pairs, keep)
        core, pool, dual, messages = _ascended(hunt, core, dual.prices, rows, patient)
    return core, pool, dual, messages


def _ascended(
    hunt: Hunt, core: Core, prices: Floats, rows: list[Row], patient: bool = False
) -> tuple[Core, Pool, Dual, Messages]:
    """Ascent from these prices, descent and judgement."""
    pool, messages = _start(hunt, core), Messages(core.loaded, core.counts)
    aim = Within(core.loaded, hunt.budget, pool, hunt.seconds - core.constant)
    dual = _ascend(hunt, messages, pool, aim, prices, patient)
    hunt.bound(dual.lower + core.constant, rows, dual.prices.tolist())
    _descend(hunt, core, pool, dual)
    _offer(hunt, core, pool)
    return core, pool, dual, messages


def _deepen(hunt: Hunt, core: Core, pool: Pool, dual: Dual, messages: Messages, rows: list[Row] | None = None) -> Dual:
    """A longer ascent, to where only a search goes on, and descent from what it found; with rows a bound as well."""
    aim = Within(core.loaded, hunt.budget, pool, hunt.seconds - core.constant)
    found = _ascend(hunt, messages, pool, aim, dual.prices, True)
    dual = found if found.lower > dual.lower else dual
    if rows is not None:
        hunt.bound(dual.lower + core.constant, rows, dual.prices.tolist())
    _descend(hunt, core, pool, dual)
    _offer(hunt, core, pool)
    return dual


def _ascend(
    hunt: Hunt, messages: Messages, pool: Pool, aim: Within, start: Floats | None = None, patient: bool = False
) -> Dual:
    """An ascent towards the target of the hunt."""
    effort: Mapping[str, Any] = LONG if patient else {}
    return ascend(messages, pool, aim, start=start, target=hunt.target / 4, deadline=hunt.deadline, **effort)


def _affordable(hunt: Hunt, core: Core, dual: Dual, messages: Messages) -> list[Ints]:
    """Per class of the core the strategies that a plan better than the best may take, at one member at least."""
    messages.set(dual.prices)
    messages.run(SETTLE)
    spare = float(dual.prices @ (core.loaded.constants - hunt.budget))
    limit = hunt.seconds - core.constant - spare + CLOSED * abs(hunt.seconds)
    keep = [np.flatnonzero(bound <= limit) for bound in messages.bounds]
    plan = None if hunt.plan is None else core.project(hunt.plan)
    if plan is not None and hunt.plan is not None and np.array_equal(core.lift(plan), hunt.plan):
        assert all(s in k for s, k in zip(plan, keep, strict=True)), "a bound rules out the best plan"
    return keep


def _descend(hunt: Hunt, core: Core, pool: Pool, dual: Dual) -> None:
    """One-swap descent from the best plan that fits and from the best when bytes are paid for."""
    swapper = Swapper(core.loaded)
    near = np.argsort(pool.seconds + pool.held @ dual.prices, kind="stable")[:DESCENTS]
    first = pool.fitting(hunt.budget)[:1]
    starts = dict.fromkeys([*first.tolist(), *near.tolist()])
    pool.add([swapper.descend(pool.plans[i], pool.held[i], hunt.budget) for i in starts])


def _offer(hunt: Hunt, core: Core, pool: Pool) -> None:
    """Judge the plans that fit on the rows known, cheapest first, until one truly fits."""
    for i in pool.fitting(hunt.budget)[:OFFERS]:
        if pool.seconds[i] + core.constant >= hunt.seconds or hunt.offer(core.lift(pool.plans[i])):
            return
