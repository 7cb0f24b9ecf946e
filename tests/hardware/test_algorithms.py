"""The closed forms against algorithms run message by message, against lower bounds, and against the textbook table."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.hardware.algorithms import ALGORITHMS, two_level_time
from tests.hardware.simulation import STEPS, Message, Outcome, pipelined_server, run, start, two_level
from tests.support.effort import examples

ALPHA, BETA, GAMMA = 1e-5, 1e-9, 1e-10
CASES = [(kind, name) for kind, algorithms in STEPS.items() for name in algorithms]
UNSENT = {"copy", "shift", "direct"}  # not messages between two workers each: threads of one memory, hops on a ring

workers = st.integers(2, 17)
chunks = st.integers(1, 5)


def simulated(kind: str, name: str, p: int, chunk: int) -> Outcome:
    """The collective run on random data; every worker ends with what the kind promises."""
    state, wanted = start(kind, p, chunk, np.random.default_rng(p * 100 + chunk))
    outcome = run(state, STEPS[kind][name](p), lambda i, j: (ALPHA, BETA), GAMMA)
    for have, want in zip(outcome.state, wanted, strict=False):
        for key, piece in want.items():
            np.testing.assert_array_equal(have[key], piece)
    return outcome


def test_every_closed_form_is_simulated() -> None:
    forms = {(k, name) for k, algorithms in ALGORITHMS.items() for name in algorithms if name not in UNSENT}
    assert forms == set(CASES)


@pytest.mark.parametrize(("kind", "name"), CASES)
@given(p=workers, chunk=chunks)
@settings(max_examples=examples(20))
def test_closed_form_is_what_the_messages_cost(kind: str, name: str, p: int, chunk: int) -> None:
    algorithm, nbytes = ALGORITHMS[kind][name], p * chunk
    if not algorithm.runs_on(p):
        p = 1 << (p.bit_length() - 1)
        nbytes = p * chunk
    outcome = simulated(kind, name, p, chunk)
    assert outcome.steps == algorithm.messages(p)
    assert outcome.critical == pytest.approx(algorithm.volume(p) * nbytes, rel=1e-12)
    assert outcome.total == pytest.approx(algorithm.total(p) * nbytes, rel=1e-12)
    assert outcome.reduced == pytest.approx(algorithm.reduced(p) * nbytes, rel=1e-12)
    assert outcome.seconds == pytest.approx(algorithm.time(p, nbytes, ALPHA, BETA, GAMMA), rel=1e-12)


def test_powers_of_two_only_means_it() -> None:
    """Recursive halving over six has partners that do not exist; the planner takes Bruck's order instead."""
    with pytest.raises((AssertionError, IndexError, KeyError)):
        simulated("reduce-scatter", "halving", 6, 1)
    assert not ALGORITHMS["reduce-scatter"]["halving"].runs_on(6)


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter"])
@given(p=workers)
def test_no_algorithm_beats_the_lower_bounds(kind: str, p: int) -> None:
    """ceil(log2 p) steps; (p-1)/p of the bytes per worker, twice that for an all-reduce among the workers."""
    share = (2 if kind == "all-reduce" else 1) * (p - 1) / p
    for name, algorithm in ALGORITHMS[kind].items():
        if name == "copy" or not algorithm.runs_on(p):
            continue
        assert algorithm.messages(p) >= math.ceil(math.log2(p))
        assert algorithm.volume(p) >= share * (1 - 1e-12)
        assert algorithm.total(p) >= p * share * (1 - 1e-12)


@pytest.mark.parametrize("p", [2, 4, 8, 16, 64])
@pytest.mark.parametrize("n", [1e3, 1e9])
def test_textbook_forms(p: int, n: float) -> None:
    """Chan et al., tables of sections 4 and 5, for powers of two."""
    a, b, g, log, share = ALPHA, BETA, GAMMA, math.log2(p), (p - 1) / p
    expected = {
        ("broadcast", "mst"): log * (a + n * b),
        ("reduce", "mst"): log * (a + n * b + n * g),
        ("scatter", "mst"): log * a + share * n * b,
        ("gather", "mst"): log * a + share * n * b,
        ("reduce-scatter", "mst"): 2 * log * a + log * n * (b + g) + share * n * b,
        ("all-reduce", "tree"): 2 * log * a + log * n * (2 * b + g),
        ("all-gather", "mst"): 2 * log * a + log * n * b + share * n * b,
        ("reduce-scatter", "ring"): (p - 1) * a + share * n * (b + g),
        ("all-gather", "ring"): (p - 1) * a + share * n * b,
        ("all-reduce", "ring"): 2 * (p - 1) * a + share * n * (2 * b + g),
        ("broadcast", "ring"): (log + p - 1) * a + 2 * share * n * b,
        ("reduce", "ring"): (log + p - 1) * a + share * n * (2 * b + g),
    }
    for (kind, name), seconds in expected.items():
        assert ALGORITHMS[kind][name].time(p, n, a, b, g) == pytest.approx(seconds, rel=1e-12), (kind, name)


@pytest.mark.parametrize("p", [2, 8, 64])
def test_table_of_gradient_exchange(p: int) -> None:
    """(total bytes, steps, bytes one after the other) in units of M, as the simulated algorithms have them.

    The table of the textbooks counts N where N - 1 messages are sent: 2 N M in all for ring, tree, halving and a
    sharded server, N^2 M for the naive exchange, 2 N steps for the ring. Butterfly and one parameter server are exact
    there, but for the server's time of N M / b, one direction of its link, which takes pipelining (tested below).
    """
    log = math.log2(p)
    exact = {
        "parameter-server": (2 * p, 2 * p, 2 * p),
        "sharded-server": (2 * (p - 1), 2 * (p - 1), 2 * (p - 1) / p),
        "naive": (p * (p - 1), p - 1, p - 1),
        "sequential": (2 * (p - 1), 2 * (p - 1), 2 * (p - 1)),
        "ring": (2 * (p - 1), 2 * (p - 1), 2 * (p - 1) / p),
        "tree": (2 * (p - 1), 2 * log, 2 * log),
        "butterfly": (p * log, log, log),
        "halving-doubling": (2 * (p - 1), 2 * log, 2 * (p - 1) / p),
    }
    for name, figures in exact.items():
        a = ALGORITHMS["all-reduce"][name]
        assert (a.total(p), a.messages(p), a.volume(p)) == pytest.approx(figures), name


def table(n: int) -> dict[str, tuple[float, float | None, float | None]]:
    """The textbooks' round figures for M bytes over n workers: M in all, steps, M one after the other."""
    log = math.log2(n)
    return {
        "parameter-server": (2 * n, None, n),
        "sharded-server": (2 * n, 2 * n, 2),
        "naive": (n * n, None, None),
        "ring": (2 * n, 2 * n, 2),
        "tree": (2 * n, 2 * log, 2 * log),
        "butterfly": (n * log, log, log),
        "halving-doubling": (2 * n, 2 * log, 2),
    }


@pytest.mark.parametrize("name", sorted(table(2)))
def test_round_figures_are_the_limit_for_many_workers(name: str) -> None:
    p, exact = 2**20, ALGORITHMS["all-reduce"][name]
    total, steps, critical = table(p)[name]
    directions = 2 if name == "parameter-server" else 1
    assert exact.total(p) == pytest.approx(total, rel=1e-5)
    assert steps is None or exact.messages(p) == pytest.approx(steps, rel=1e-5)
    assert critical is None or exact.volume(p) == pytest.approx(directions * critical, rel=1e-5)


@given(p=st.integers(1, 9), count=st.integers(1, 12), chunk=chunks)
@settings(max_examples=40)
def test_a_pipelined_server_takes_one_direction_of_its_link(p: int, count: int, chunk: int) -> None:
    """k chunks: N (k + 1) steps of M / k, which tends to the table's N M / b from above, 2 N M / b with one chunk."""
    own = np.random.default_rng(p).integers(-9, 9, size=(p, count, chunk)).astype(float)
    state = [{c: own[i, c] for c in range(count)} for i in range(p)] + [{c: np.zeros(chunk) for c in range(count)}]
    outcome = run(state, pipelined_server(p, count), lambda i, j: (ALPHA, BETA), 0.0)
    nbytes = count * chunk
    for worker in outcome.state:
        np.testing.assert_array_equal([worker[c] for c in range(count)], own.sum(axis=0))
    assert outcome.steps == p * (count + 1)
    assert outcome.critical * count == p * nbytes * (count + 1)
    assert outcome.total == 2 * p * nbytes


@given(hosts=st.integers(2, 5), per_host=st.integers(2, 5), chunk=chunks)
@settings(max_examples=30)
def test_two_levels_cost_what_their_messages_cost(hosts: int, per_host: int, chunk: int) -> None:
    p, intra, inter = hosts * per_host, (1e-6, 1e-11), (1e-5, 1e-9)
    state, wanted = start("all-reduce", p, chunk, np.random.default_rng(p))

    def cost(i: int, j: int) -> tuple[float, float]:
        return intra if i // per_host == j // per_host else inter

    outcome = run(state, two_level(hosts, per_host), cost, GAMMA)
    for have, want in zip(outcome.state, wanted, strict=False):
        for key, piece in want.items():
            np.testing.assert_array_equal(have[key], piece)
    rings = ALGORITHMS["reduce-scatter"]["ring"], ALGORITHMS["all-gather"]["ring"]
    expected = two_level_time(
        rings, ALGORITHMS["all-reduce"]["ring"], hosts, per_host, p * chunk, intra, inter, GAMMA
    )  # fmt: skip
    assert outcome.seconds == pytest.approx(expected, rel=1e-12)


@given(p=st.integers(2, 24))
def test_pieces_along_a_ring_hop_the_shorter_way(p: int) -> None:
    """All hops of all pieces of an all-to-all, shared by all devices, are the volume of "shift"."""
    hops = sum(min((j - i) % p, (i - j) % p) for i in range(p) for j in range(p))
    shift = ALGORITHMS["all-to-all"]["shift"]
    assert hops / p / p == pytest.approx(shift.volume(p))
    assert hops / p == pytest.approx(shift.total(p))
    assert shift.messages(p) >= p // 2


def test_one_worker_is_free() -> None:
    assert all(a.time(1, 1e9, ALPHA, BETA) == 0 for kind in ALGORITHMS.values() for a in kind.values())


def test_the_simulation_catches_a_wrong_algorithm() -> None:
    """Sending what is not there, or on a link in use, fails."""
    state, _ = start("scatter", 3, 1, np.random.default_rng(0))
    with pytest.raises(KeyError):
        run(state, [[Message(1, 2, (0,))]], lambda i, j: (0.0, 0.0), 0.0)
    with pytest.raises(AssertionError, match="used twice"):
        run(state, [[Message(0, 1, (0,)), Message(0, 2, (0,))]], lambda i, j: (0.0, 0.0), 0.0)
