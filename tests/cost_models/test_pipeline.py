"""The event simulator against longest paths and against what the papers publish, in integers; and the closed forms."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise, product
from typing import Any

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models.pipeline import CLOSED_FORMS, Prices, closed_form, simulate, transfer_times, uniform
from autopar.errors import ScheduleError
from autopar.schedules import SCHEDULES, Schedule, Size, make
from tests.schedules.sizes import named_sizes, schedules

seconds = st.integers(1, 9)
SIZES = [(1, 1), (1, 5), (2, 1), (2, 8), (3, 2), (4, 4), (4, 32), (8, 3), (8, 16)]


def ratio(name: str, size: Size, prices: Prices) -> Fraction:
    """Bubble over ideal, exactly."""
    simulation = simulate(make(name, size), prices)
    busy = sum(map(Fraction, simulation.busy))
    return (size.ranks * Fraction(simulation.seconds) - busy) / busy


# Longest paths


def longest_path(schedule: Schedule, prices: Prices) -> Mapping[Any, float]:
    """End of every pass, and of "all", as the longest path through the graph of what waits for what."""
    pipeline, graph = schedule.pipeline, nx.DiGraph()
    stages, passes = pipeline.stages, prices.passes(pipeline.split)
    links: dict[Any, list[Any]] = {}
    graph.add_node("all", seconds=0)
    for rank, instructions in enumerate(schedule.lists):
        chain: list[Any] = [("start", rank)]
        graph.add_node(chain[0], seconds=0)
        for i in instructions:
            node: Any = (i.op, i.kind, i.stage, i.microbatch)
            if i.op == "run":
                graph.add_node(node, seconds=passes[i.kind][i.stage % stages])
                for other in pipeline.inputs(i.kind, i.stage):
                    graph.add_edge(("transfer", i.kind, other, i.microbatch, i.stage), node)
            elif i.op in ("reduce", "update"):
                graph.add_node(node, seconds=getattr(prices, i.op)[i.stage % stages])
                if i.op == "reduce":
                    together = ("together", i.stage % stages, i.microbatch)
                    graph.add_node(together, seconds=0)
                    graph.add_edge(chain[-1], together)
                    graph.add_edge(together, node)
            elif i.op in ("send", "recv"):
                node = ("transfer", i.kind, i.stage, i.microbatch, i.to)
                graph.add_node(node, seconds=prices.transfer[i.stage % stages, i.to % stages])
                if i.op == "send" and prices.overlap:
                    graph.add_edge(chain[-1], node)
                    links.setdefault((rank, pipeline.placement[i.to]), []).append(node)
                if prices.overlap:
                    continue
            else:
                continue
            chain.append(node)
        chain.append("all")
        graph.add_edges_from(pairwise(chain))
    for line in links.values():
        graph.add_edges_from(pairwise(line))
    ends: dict[Any, float] = {}
    for node in nx.topological_sort(graph):
        ends[node] = max((ends[before] for before in graph.predecessors(node)), default=0) + graph.nodes[node].get(
            "seconds", 0
        )
    return ends


@given(schedule=schedules(), data=st.data(), overlap=st.booleans())
@settings(max_examples=120)
def test_simulation_is_the_longest_path(schedule: Schedule, data: st.DataObject, overlap: bool) -> None:
    """For unlike stages and transfers, every pass ends when the last thing that it waits for allows."""
    stages = schedule.pipeline.stages

    def times() -> tuple[int, ...]:
        return tuple(data.draw(st.lists(st.integers(0, 9), min_size=stages, max_size=stages)))

    borders = [pair for a, b in schedule.pipeline.borders for pair in ((a, b), (b, a))]
    transfer = {pair: data.draw(st.integers(0, 9)) for pair in borders}
    prices = Prices(times(), times(), times(), transfer, times(), times(), overlap=overlap)
    simulation, judged = simulate(schedule, prices), longest_path(schedule, prices)
    assert simulation.seconds == judged["all"]
    for instructions, starts, ends in zip(schedule.lists, simulation.starts, simulation.ends, strict=True):
        assert len(instructions) == len(starts) == len(ends)
        for i, start, end in zip(instructions, starts, ends, strict=True):
            assert start <= end
            if i.op in ("run", "reduce", "update"):
                assert end == judged[i.op, i.kind, i.stage, i.microbatch]


def test_a_pass_waits_for_its_last_input() -> None:
    """What stage 0 makes for stage 2 is sent first and comes last."""
    schedule = make("inference", Size(3, 1), [(0, 1), (0, 2), (1, 2)])
    assert simulate(schedule, Prices((1, 1, 1), transfer={(0, 2): 100})).seconds == 1 + 100 + 1


# What the papers publish


@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_plain_placement_uses_one_device_at_a_time(p: int) -> None:
    simulation = simulate(make("gpipe", Size(p, 1)), uniform(p, 3, 5))
    assert [Fraction(busy, simulation.seconds) for busy in simulation.busy] == [Fraction(1, p)] * p


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b", "inference", "terapipe"])
@pytest.mark.parametrize(("p", "m"), SIZES)
@given(forward=seconds, backward=seconds)
@settings(max_examples=5)
def test_utilisation_of_a_flushed_pipeline(name: str, p: int, m: int, forward: int, backward: int) -> None:
    """m / (m + p - 1), and (p - 1) / m over the ideal (Huang et al., 2019; Narayanan et al., 2021)."""
    simulation = simulate(make(name, Size(p, m)), uniform(p, forward, backward))
    assert [Fraction(busy, simulation.seconds) for busy in simulation.busy] == [Fraction(m, m + p - 1)] * p
    assert ratio(name, Size(p, m), uniform(p, forward, backward)) == Fraction(p - 1, m)
    assert simulation.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert simulation.bubble_over_ideal == pytest.approx((p - 1) / m)


def test_four_stages_go_from_25_to_57_percent() -> None:
    plain, pipelined = (simulate(make("gpipe", Size(4, m)), uniform(4, 1, 2)).utilisation for m in (1, 4))
    assert plain == (1 / 4,) * 4
    assert pipelined == (4 / 7,) * 4


@pytest.mark.parametrize(("p", "v", "groups"), [*product((1, 2, 4), (1, 2, 3), (1, 2, 5)), (8, 4, 1)])
@given(forward=seconds, backward=seconds)
@settings(max_examples=3)
def test_interleaving_divides_the_bubble(p: int, v: int, groups: int, forward: int, backward: int) -> None:
    """(p - 1) / (v m) over the ideal (Narayanan et al., 2021, section 2.2)."""
    prices = uniform(p * v, forward, backward)
    assert ratio("interleaved-1f1b", Size(p, p * groups, chunks=v), prices) == Fraction(p - 1, v * p * groups)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (3, 7), (4, 4), (4, 12), (8, 8), (8, 20)])
@given(forward=seconds, backward=seconds, data=st.data())
@settings(max_examples=8)
def test_bubble_of_zb_h1(p: int, m: int, forward: int, backward: int, data: st.DataObject) -> None:
    """(p - 1) (F + B - W) for m >= p and W <= F, W <= B (Qi et al., 2023)."""
    weight = data.draw(st.integers(0, min(forward, backward)))
    prices = uniform(p, forward, backward, weight)
    simulation = simulate(make("zb-h1", Size(p, m)), prices)
    work = m * (forward + backward + weight)
    assert simulation.busy == (work,) * p
    assert simulation.seconds - work == (p - 1) * (forward + backward - weight)
    assert simulate(make("1f1b", Size(p, m)), prices).seconds - work == (p - 1) * (forward + backward + weight)


def test_bubbles_come_in_the_published_order() -> None:
    """ZB-H1 and interleaving below 1F1B, which equals GPipe; with F = B = W, ZB-H1 has a third of 1F1B's."""
    p, m = 4, 8
    ratios = {name: ratio(name, Size(p, m), uniform(p, 1, 1, 1)) for name in ("gpipe", "1f1b", "zb-h1")}
    ratios["interleaved"] = ratio("interleaved-1f1b", Size(p, m, chunks=2), uniform(2 * p, 1, 1, 1))
    assert ratios["zb-h1"] == ratios["1f1b"] / 3 < ratios["interleaved"] == ratios["1f1b"] / 2
    assert ratios["1f1b"] == ratios["gpipe"]


GPIPE_TABLE = {1: (1.0, 1.07, 1.3), 4: (1.7, 3.2, 4.8), 32: (1.8, 3.4, 6.3)}
"""Microbatches -> throughput at 2, 4 and 8 accelerators, 1 at 2 with one microbatch (Huang et al., 2019, table 2)."""


def test_published_table_of_gpipe() -> None:
    """Rows and columns rise as published. With many microbatches, uniform stages are an upper bound: 1.9, 3.7, 6.6.

    With few they are none: one microbatch on more accelerators gains nothing in the model, but did so on real ones.
    """

    def throughput(p: int, m: int) -> Fraction:
        """Of one batch of p m units of work: a stage of one microbatch takes 1 / (p m) of it."""
        return Fraction(p * m) / simulate(make("gpipe", Size(p, m)), uniform(p, 1, 3)).seconds

    model = {m: [throughput(p, m) / throughput(2, 1) for p in (2, 4, 8)] for m in GPIPE_TABLE}
    for rows in (model, GPIPE_TABLE):
        assert all(a <= b for row in rows.values() for a, b in pairwise(row))
        assert all(a < b for column in zip(*rows.values(), strict=True) for a, b in pairwise(column))
    assert model[1] == [1, 1, 1]
    assert all(1 <= mine / theirs <= 1.1 for mine, theirs in zip(model[32], GPIPE_TABLE[32], strict=True))


@pytest.mark.parametrize(("p", "units"), [*product((2, 4, 6, 8), (1, 2, 3))])
def test_bubble_of_chimera(p: int, units: int) -> None:
    """(D - 2) / (2 N + D - 2) for F = B; for B = 2 F and N = D, (D - 2) / (3 N / 2 + D - 2) (Li and Hoefler, 2021)."""
    m = p * units
    simulation = simulate(make("chimera", Size(p, m)), uniform(p, 1, 1))
    assert 1 - Fraction(simulation.busy[0], simulation.seconds) == Fraction(p - 2, 2 * m + p - 2)
    if units == 1:
        simulation = simulate(make("chimera", Size(p, m)), uniform(p, 1, 2))
        assert 1 - Fraction(simulation.busy[0], simulation.seconds) == (p - 2) / (Fraction(3 * m, 2) + p - 2)


@given(p=st.integers(1, 6), slices=st.lists(seconds, min_size=1, max_size=8))
@settings(max_examples=30)
def test_latency_of_terapipe(p: int, slices: list[int]) -> None:
    """sum t_i + (K - 1) max t_i each way, for slices of unlike cost (Li et al., 2021)."""
    schedule = make("terapipe", Size(p, 1, slices=len(slices)))
    simulation = simulate(schedule, Prices((2,) * p, (3,) * p, scale=tuple(slices)))
    assert simulation.seconds == (2 + 3) * (sum(slices) + (p - 1) * max(slices))


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw", "ampnet"])
@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 4), (4, 8)])
def test_asynchronous_schedules_have_no_bubble_in_steady_state(name: str, p: int, m: int) -> None:
    """Once the pipeline is full another batch costs its work alone; a flushed one pays its bubble again."""
    prices = uniform(p, 2, 2)
    took = [simulate(make(name, Size(p, m, batches=k)), prices).seconds for k in range(1, 6)]
    assert [after - before for before, after in pairwise(took)] == [m * 4] * 4
    assert simulate(make("1f1b", Size(p, m)), prices).seconds == (m + p - 1) * 4


@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (3, 1), (1, 1)])
def test_pipedream_never_waits_between_warm_up_and_drain(forward: int, backward: int) -> None:
    p, m = 4, 12
    schedule = make("pipedream", Size(p, m))
    simulation = simulate(schedule, uniform(p, forward, backward))
    for instructions, starts, ends in zip(schedule.lists, simulation.starts, simulation.ends, strict=True):
        runs = [(i.kind, a, b) for i, a, b in zip(instructions, starts, ends, strict=True) if i.op == "run"]
        first = next(k for k, (kind, _, _) in enumerate(runs) if kind == "B")
        last = max(k for k, (kind, _, _) in enumerate(runs) if kind == "F")
        assert all(b == c for (_, _, b), (_, c, _) in pairwise(runs[first : last + 1]))


def test_eager_forward_passes_hide_transfers() -> None:
    """Zhuang et al. (2023): as long as 1F1B without transfers, shorter with."""
    p, m = 4, 16
    free, dear = uniform(p, 4, 4), Prices((4,) * p, (4,) * p, transfer={(s, s + 1): 3 for s in range(p - 1)})
    assert simulate(make("eager-1f1b", Size(p, m)), free).seconds == simulate(make("1f1b", Size(p, m)), free).seconds
    assert simulate(make("eager-1f1b", Size(p, m)), dear).seconds < simulate(make("1f1b", Size(p, m)), dear).seconds


# Memory, transfers, what is paid once


def test_bytes_of_the_stash() -> None:
    p, m, full, rest = 4, 8, 10, 3
    prices = Prices((1,) * p, (1,) * p, (1,) * p, stash=(full,) * p, deferred=(rest,) * p)
    assert simulate(make("gpipe", Size(p, m)), prices).stash_bytes == (m * full,) * p
    assert simulate(make("1f1b", Size(p, m)), prices).stash_bytes == tuple((p - s) * full for s in range(p))
    assert simulate(make("zb-h1", Size(p, m)), prices).stash == (p,) * p
    assert simulate(make("zb-h1", Size(p, m)), prices).stash_bytes == tuple((p - s) * full + s * rest for s in range(p))
    assert simulate(make("inference", Size(p, m)), prices).stash_bytes == (0,) * p


def test_bytes_of_received_values() -> None:
    """Rank 1 has the next microbatch while it holds one, rank 0 a cotangent while it holds two; see lists.txt."""
    prices = Prices((1, 1), (1, 1), stash=(10, 10), border={(0, 1): 3, (1, 0): 4})
    assert simulate(make("1f1b", Size(2, 4)), prices).stash_bytes == (2 * 10 + 4, 10 + 3)
    assert simulate(make("inference", Size(2, 4)), prices).stash_bytes == (0, 3)


def test_transfers_beside_computation_cost_less_than_transfers_that_stop_it() -> None:
    p, m = 3, 6
    transfer = transfer_times({(s, s + 1): 4 for s in range(p - 1)}, 1, 0.25)
    assert transfer == {(0, 1): 2, (1, 0): 2, (1, 2): 2, (2, 1): 2}
    by_overlap = [
        simulate(make("1f1b", Size(p, m)), Prices((4,) * p, (8,) * p, transfer=transfer, overlap=overlap)).seconds
        for overlap in (True, False)
    ]
    assert simulate(make("1f1b", Size(p, m)), uniform(p, 4, 8)).seconds < by_overlap[0] < by_overlap[1]


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_a_stage_does_once_is_paid_per_update(name: str) -> None:
    """By every copy of a stage; in a synchronous schedule once."""
    schedule = make(name, Size(2, 4))
    free, dear = Prices((1, 1), (1, 1)), Prices((1, 1), (1, 1), reduce=(5, 1), update=(2, 1))
    updates = [i.stage % 2 for instructions in schedule.lists for i in instructions if i.op == "update"]
    simulation = simulate(schedule, dear)
    assert sum(simulation.busy) - sum(simulate(schedule, free).busy) == sum((7, 2)[stage] for stage in updates)
    assert len(updates) == 2 * schedule.pipeline.copies or not SCHEDULES[name].synchronous
    assert simulation.seconds > simulate(schedule, free).seconds


def test_prices_have_to_fit() -> None:
    with pytest.raises(ScheduleError, match="forward has prices of 3 stages, the pipeline has 2"):
        simulate(make("1f1b", Size(2, 2)), uniform(3, 1, 1))
    with pytest.raises(ScheduleError, match="stash has prices of 1 stages, the pipeline has 2"):
        simulate(make("1f1b", Size(2, 2)), Prices((1, 1), (1, 1), stash=(4,)))
    with pytest.raises(ScheduleError, match=r"schedule 'ampnet' has no closed form; there are .*"):
        closed_form("ampnet", uniform(2, 1, 1), 2, 2)


# Closed forms


@pytest.mark.parametrize("name", CLOSED_FORMS)
@given(data=st.data(), forward=seconds, backward=seconds, once=st.integers(0, 5))
@settings(max_examples=25)
def test_closed_forms_are_exact_for_like_stages(
    name: str, data: st.DataObject, forward: int, backward: int, once: int
) -> None:
    _, size = data.draw(named_sizes((name,)))
    p, m, stages = size.ranks, size.microbatches, size.ranks * size.chunks
    weight = data.draw(st.integers(0, backward))
    prices = uniform(stages, forward, backward, weight)
    assert closed_form(name, prices, p, m) == simulate(make(name, size), prices).seconds
    dearer = Prices(prices.forward, prices.backward, prices.weight, update=(once,) * stages)
    assert closed_form(name, dearer, p, m) == closed_form(name, prices, p, m) + once


@pytest.mark.parametrize("name", CLOSED_FORMS)
@given(data=st.data())
@settings(max_examples=60)
def test_closed_forms_bound_unlike_stages(name: str, data: st.DataObject) -> None:
    """Stages of unlike size but with one ratio of their passes; any passes at all where the form allows it."""
    _, size = data.draw(named_sizes((name,)))
    p, m, stages = size.ranks, size.microbatches, size.ranks * size.chunks
    scales = data.draw(st.lists(st.integers(1, 20), min_size=stages, max_size=stages))
    forward, backward = data.draw(seconds), data.draw(seconds)
    weight = data.draw(st.integers(0, min(forward, backward)))
    prices = Prices(*(tuple(passes * scale for scale in scales) for passes in (forward, backward, weight)))
    simulated_seconds = simulate(make(name, size), prices).seconds
    assert simulated_seconds <= closed_form(name, prices, p, m)
    assert simulated_seconds == closed_form(name, prices, p, m) or name not in ("inference", "gpipe")


@pytest.mark.parametrize("name", ["inference", "gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b"])
@given(data=st.data())
@settings(max_examples=60)
def test_bounds_that_hold_for_any_passes(name: str, data: st.DataObject) -> None:
    """The form of gpipe bounds 1f1b and eager-1f1b too, whose own form needs one ratio of F to B."""
    _, size = data.draw(named_sizes((name,)))
    p, m, stages = size.ranks, size.microbatches, size.ranks * size.chunks
    times = st.lists(st.sampled_from([0, 1, 2, 10]), min_size=stages, max_size=stages)
    prices = Prices(tuple(data.draw(times)), tuple(data.draw(times)))
    simulated_seconds = simulate(make(name, size), prices).seconds
    form = "gpipe" if name in ("1f1b", "eager-1f1b") else name
    assert simulated_seconds <= closed_form(form, prices, p, m)
    assert simulated_seconds == closed_form(form, prices, p, m) or name not in ("inference", "gpipe")


def test_the_form_of_1f1b_needs_one_ratio() -> None:
    """The slowest F on stage 1 and the slowest B on stage 0 alternate on the critical path."""
    prices = Prices((0, 50, 0, 0), (50, 0, 0, 0))
    assert simulate(make("1f1b", Size(4, 4)), prices).seconds == 350 > closed_form("1f1b", prices, 4, 4) == 250
