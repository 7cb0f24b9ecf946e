"""What a pipeline schedule costs: an event simulator for any instruction lists, and closed forms for the search.

The simulator runs the very lists that the runtime executes (`autopar.schedules`). Each rank issues its list in order;

    start(pass)      = max(its rank is free, its last input has arrived)
    start(transfer)  = max(the sender has come to it, the link is free)         transfers beside computation
                       max(sender and receiver have both come to it)            otherwise: both ranks wait
    start(reduce)    = max over the ranks of the copies of a stage

and what a rank does at once (accumulate, free) takes no time. With T the time at which the last rank is done, and
busy(r) what rank r computes,

    utilisation(r) = busy(r) / T,     bubble = 1 - mean utilisation,     bubble over ideal = T / mean busy - 1

One pass over the instructions, O(number of instructions). Times may be any numbers: with integers it is exact.

Closed forms, for p ranks, v stages per rank and m microbatches, without transfers -> CLOSED_FORMS. With F, B, W the
seconds of a stage's passes and t = F + B + W (a backward pass that is not split takes B + W):

    inference         sum F + (m - 1) max F
    gpipe             sum F + (m - 1) max F + sum (B + W) + (m - 1) max (B + W)
    1f1b, eager-1f1b  sum t + (m - 1) max t                                                              [D], [A]
    interleaved-1f1b  (v m + p - 1) (max F + max (B + W))                                                [N]
    zb-h1             sum (F + B) + (m - 1) max t + max W - (min(p, m) - 1) min(W, F over all stages)    [Z]

All are exact where stages are alike (zb-h1: and W <= B), those of inference and gpipe always. The others are upper
bounds, not proved, but 15,000 random cases of each brought no exception: interleaved-1f1b for any stages;
1f1b and eager-1f1b where F : B + W is the same for all stages; zb-h1 where F : B : W is and W <= F, W <= B.
Without such a ratio 1f1b can take longer than its form, by 40% in the worst case found (the slowest F on one stage, the
slowest B on another), but in no case found longer than the form of gpipe.

Sources: [D] Fan et al. (2021), DAPPLE. [A] Zheng et al. (2022), Alpa. [N] Narayanan et al. (2021),
Efficient large-scale language model training on GPU clusters using Megatron-LM, section 2.2. [Z] Qi et al. (2023),
Zero bubble pipeline parallelism, section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from autopar.errors import ScheduleError
from autopar.schedules import Instruction, Kind, Pipeline, Schedule

Seconds = tuple[float, ...]


@dataclass(frozen=True)
class Prices:
    """What the stages of a pipeline cost; one entry per stage (the copies of a stage cost the same).

    Attributes:
        forward: s of a forward pass of one microbatch.
        backward: s of the gradients of a stage's inputs for one microbatch, recomputation included.
        weight: s of the gradients of its weights; a backward pass that is not split takes both. Empty: 0.
        transfer: (a, b) -> s to bring what stage a makes for stage b to its rank, a > b for cotangents. Missing: 0.
        reduce: s to sum gradients over a stage's devices and copies, once per update. Empty: 0.
        update: s of what a stage does once per update. Empty: 0.
        stash: bytes a stage holds per microbatch between F and B. Empty: 0.
        deferred: bytes it still holds between B and W. Empty: 0.
        border: (a, b) -> bytes of what stage a makes for stage b, live from its receive to the pass that reads it
            (afterwards it belongs to the stash). Missing: 0.
        overlap: transfers run beside computation; otherwise they keep both ranks.
        scale: factor on the passes of slice i % len(scale), for slices of unlike cost. Empty: all alike.
    """

    forward: Seconds
    backward: Seconds = ()
    weight: Seconds = ()
    transfer: Mapping[tuple[int, int], float] = field(default_factory=dict)
    reduce: Seconds = ()
    update: Seconds = ()
    stash: tuple[float, ...] = ()
    deferred: tuple[float, ...] = ()
    border: Mapping[tuple[int, int], float] = field(default_factory=dict)
    overlap: bool = True
    scale: tuple[float, ...] = ()

    def passes(self, split: bool) -> Mapping[Kind, Seconds]:
        """Seconds of each kind of pass per stage; with `split`, gradients of weights have passes of their own."""
        zero = (0,) * len(self.forward)
        backward, weight = self.backward or zero, self.weight or zero
        whole = tuple(b + w for b, w in zip(backward, weight, strict=True))
        return {"F": self.forward, "B": backward if split else whole, "W": weight}


def transfer_times(
    nbytes: Mapping[tuple[int, int], float], alpha: float, beta: float
) -> Mapping[tuple[int, int], float]:
    """`Prices.transfer` of borders (a, b), a < b, that carry `nbytes` each way; alpha in s, beta in s/byte."""
    return {pair: alpha + beta * n for (a, b), n in nbytes.items() for pair in ((a, b), (b, a))}


def uniform(stages: int, forward: float, backward: float = 0, weight: float = 0) -> Prices:
    """Prices of `stages` stages that are all alike; s per pass."""
    return Prices((forward,) * stages, (backward,) * stages, (weight,) * stages)


@dataclass(frozen=True)
class Simulation:
    """What a schedule takes.

    Attributes:
        seconds: until the last rank is done.
        busy: per rank, s in passes, reductions and updates.
        starts, ends: per rank, s from the start of the step for each instruction of its list.
        stash: per rank, the most (stage, microbatch) pairs live between F and the last pass.
        stash_bytes: per rank, the most bytes that they and received values waiting for their pass take.
    """

    seconds: float
    busy: Seconds
    starts: tuple[Seconds, ...]
    ends: tuple[Seconds, ...]
    stash: tuple[int, ...]
    stash_bytes: tuple[float, ...]

    @property
    def utilisation(self) -> Seconds:
        """Per rank, the share of the time that it is busy."""
        return tuple(b / self.seconds for b in self.busy)

    @property
    def bubble(self) -> float:
        """Share of the time, over all ranks, that they are not busy."""
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds)

    @property
    def bubble_over_ideal(self) -> float:
        """Time lost over the time that ranks which never wait would take."""
        return (len(self.busy) * self.seconds - sum(self.busy)) / sum(self.busy)


def simulate(schedule: Schedule, prices: Prices) -> Simulation:
    """Play instruction lists at prices.

    Raises:
        ScheduleError: the lists block each other, or there are not as many prices as stages.
    """
    _check(schedule.pipeline, prices)
    state = _State(schedule, prices)
    lists = schedule.lists
    for rank, position in schedule.order:
        instruction = lists[rank][position]
        state.actions[instruction.op](rank, instruction)
    return state.result()


def _check(pipeline: Pipeline, prices: Prices) -> None:
    for name in ("forward", "backward", "weight", "reduce", "update", "stash", "deferred"):
        seconds: tuple[float, ...] = getattr(prices, name)
        if len(seconds) != pipeline.stages and (seconds or name == "forward"):
            raise ScheduleError(f"{name} has prices of {len(seconds)} stages, the pipeline has {pipeline.stages}")


class _State:
    """The state of a simulation: per rank when it is free, per link when it is, what has arrived, what is live."""

    def __init__(self, schedule: Schedule, prices: Prices) -> None:
        pipeline = schedule.pipeline
        ranks, copies = len(schedule.lists), pipeline.copies
        zero = (0,) * pipeline.stages
        self.pipeline, self.overlap, self.transfer = pipeline, prices.overlap, prices.transfer
        self.place, self.stages = pipeline.placement, pipeline.stages
        self.passes = {kind: seconds * copies for kind, seconds in prices.passes(pipeline.split).items()}
        self.once = {"reduce": (prices.reduce or zero) * copies, "update": (prices.update or zero) * copies}
        self.bytes = {"F": (prices.stash or zero) * copies, "B": (prices.deferred or zero) * copies}
        self.scale = prices.scale
        self.border = prices.border
        self.inbox: dict[tuple[str, int, int], float] = {}
        self.clock: list[float] = [0] * ranks
        self.busy: list[float] = [0] * ranks
        self.link: dict[tuple[int, int], float] = {}
        self.arrived: dict[tuple[str, int, int], float] = {}
        self.joint: dict[tuple[int, int], float] = {}
        self.starts: list[list[float]] = [[] for _ in range(ranks)]
        self.ends: list[list[float]] = [[] for _ in range(ranks)]
        self.stashed = [0] * ranks
        self.most = [0] * ranks
        self.stashed_bytes: list[float] = [0] * ranks
        self.most_bytes: list[float] = [0] * ranks
        self.last = "B" if pipeline.split else "F"
        self.actions: Mapping[str, Callable[[int, Instruction], None]] = {
            "run": self.run,
            "send": self.send,
            "recv": self.receive,
            "accumulate": self.at_once,
            "free": self.free,
            "reduce": self.reduce,
            "update": self.update,
        }

    def _record(self, rank: int, start: float, end: float) -> None:
        self.starts[rank].append(start)
        self.ends[rank].append(end)

    def _work(self, rank: int, start: float, seconds: float) -> None:
        end = start + seconds
        self.clock[rank] = end
        self.busy[rank] += seconds
        self._record(rank, start, end)

    def run(self, rank: int, i: Instruction) -> None:
        kind, stage = i.kind, i.stage
        seconds = self.passes[kind][stage]
        if self.scale:
            seconds = seconds * self.scale[i.microbatch % len(self.scale)]
        if self.border:
            self._hold(rank, 0, -self.inbox.pop((kind, stage, i.microbatch), 0))
        if kind == "F" and self.pipeline.backward:
            self._hold(rank, 1, self.bytes["F"][stage])
        free, arrived = self.clock[rank], self.arrived.pop((kind, stage, i.microbatch), 0)
        self._work(rank, arrived if arrived > free else free, seconds)

    def _hold(self, rank: int, count: int, nbytes: float) -> None:
        self.stashed[rank] += count
        self.stashed_bytes[rank] += nbytes
        if count > 0:
            self.most[rank] = max(self.most[rank], self.stashed[rank])
        if nbytes > 0:
            self.most_bytes[rank] = max(self.most_bytes[rank], self.stashed_bytes[rank])

    def free(self, rank: int, i: Instruction) -> None:
        left = self.bytes["B"][i.stage] if self.last == "B" else 0
        nbytes = left - self.bytes["F"][i.stage] if i.kind == "F" else -left
        self._hold(rank, -(i.kind == self.last), nbytes)
        self.at_once(rank, i)

    def at_once(self, rank: int, i: Instruction) -> None:
        self._record(rank, self.clock[rank], self.clock[rank])

    def send(self, rank: int, i: Instruction) -> None:
        """Both ends are recorded with the receive, which comes next in the order."""

    def receive(self, rank: int, i: Instruction) -> None:
        sender = self.place[i.stage]
        seconds = self.transfer.get((i.stage % self.stages, i.to % self.stages), 0)
        start = self.clock[sender]
        if self.overlap:
            start = max(start, self.link.get((sender, rank), 0))
            self.link[sender, rank] = start + seconds
        else:
            start = max(start, self.clock[rank])
            self.clock[sender] = self.clock[rank] = start + seconds
        key = (i.kind, i.to, i.microbatch)
        self.arrived[key] = max(self.arrived.get(key, 0), start + seconds)
        if self.border:
            self._keep_received(rank, key, self.border.get((i.stage % self.stages, i.to % self.stages), 0))
        self._record(sender, start, start + seconds)
        self._record(rank, start, start + seconds)

    def _keep_received(self, rank: int, key: tuple[str, int, int], nbytes: float) -> None:
        """What a pass (kind, stage, microbatch) receives is live from now on until the pass has run."""
        self.inbox[key] = self.inbox.get(key, 0) + nbytes
        self._hold(rank, 0, nbytes)

    def reduce(self, rank: int, i: Instruction) -> None:
        """All copies of the stage start together; the first of them in the order fixes when."""
        key = (i.stage % self.stages, i.microbatch)
        start = self.joint.get(key)
        if start is None:
            start = self.joint[key] = max(self.clock[r] for r in self.place[key[0] :: self.stages])
        self._work(rank, start, self.once["reduce"][i.stage])

    def update(self, rank: int, i: Instruction) -> None:
        self._work(rank, self.clock[rank], self.once["update"][i.stage])

    def result(self) -> Simulation:
        return Simulation(
            max(self.clock),
            tuple(self.busy),
            tuple(map(tuple, self.starts)),
            tuple(map(tuple, self.ends)),
            tuple(self.most),
            tuple(self.most_bytes),
        )


# Closed forms


def _line(times: Sequence[float], microbatches: int) -> float:
    """Seconds of m jobs through machines that take `times` each: one goes through all, the slowest paces the rest."""
    return sum(times) + (microbatches - 1) * max(times)


def _inference(prices: Prices, ranks: int, microbatches: int) -> float:
    return _line(prices.forward, microbatches)


def _gpipe(prices: Prices, ranks: int, microbatches: int) -> float:
    passes = prices.passes(split=False)
    return _line(passes["F"], microbatches) + _line(passes["B"], microbatches)


def _whole(prices: Prices) -> Seconds:
    passes = prices.passes(split=False)
    return tuple(f + b for f, b in zip(passes["F"], passes["B"], strict=True))


def _one_f_one_b(prices: Prices, ranks: int, microbatches: int) -> float:
    return _line(_whole(prices), microbatches)


def _interleaved(prices: Prices, ranks: int, microbatches: int) -> float:
    passes = prices.passes(split=False)
    chunks = len(prices.forward) // ranks
    return (chunks * microbatches + ranks - 1) * (max(passes["F"]) + max(passes["B"]))


def _zb_h1(prices: Prices, ranks: int, microbatches: int) -> float:
    weight = prices.passes(split=True)["W"]
    put_off = (min(ranks, microbatches) - 1) * min(*weight, *prices.forward)
    return _line(_whole(prices), microbatches) - sum(weight) + max(weight) - put_off


CLOSED_FORMS: Mapping[str, Callable[[Prices, int, int], float]] = MappingProxyType(
    {
        "inference": _inference,
        "gpipe": _gpipe,
        "1f1b": _one_f_one_b,
        "eager-1f1b": _one_f_one_b,
        "interleaved-1f1b": _interleaved,
        "zb-h1": _zb_h1,
    }
)
"""Name of a schedule -> (prices, ranks, microbatches) -> s, for all that the runtime may execute; see above."""


def closed_form(name: str, prices: Prices, ranks: int, microbatches: int) -> float:
    """Seconds of a step by the closed form of a schedule, transfers left out, the dearest reduction and update added.

    Raises:
        ScheduleError: the schedule has no closed form.
    """
    form = CLOSED_FORMS.get(name)
    if form is None:
        raise ScheduleError(f"schedule '{name}' has no closed form; there are forms for {', '.join(CLOSED_FORMS)}")
    once = [sum(pair) for pair in zip(prices.reduce or (0,), prices.update or (0,), strict=False)]
    return form(prices, ranks, microbatches) + max(once)
