"""Pipeline schedules: instruction lists, one per rank, and a checker that proves them correct.

    make(name, size)                    a Schedule from the table                           -> table.py
      order of passes on each rank      the published schedule, as a formula                -> orders.py
      complete lists                    transfers, sums, frees and updates follow           -> complete.py
    check(schedule, bounds)             complete, ready, acyclic, within its stash bound    -> checker.py
    Schedule.order                      one order of all instructions, to dispatch or cost  -> pipeline.py

The lists have all that a runtime needs (`instructions.py` defines each instruction):

- One process walks `Schedule.order` and dispatches; several walk the same order, each taking the instructions of its
  own ranks. Send and receive of a value are adjacent in it, so that they can be one program on both submeshes, and
  every process meets the transfers in the same order.
- A value between passes has the name (kind, stage, microbatch). A value for a stage on the same rank is not sent; it
  stays until that stage's pass of the same kind has read it.
- `free` drops what a forward pass keeps for its backward pass (the stash), and what a backward pass keeps for the
  gradients of the weights. A received value belongs to the stash of the pass that reads it.
- `accumulate` may be fused into the pass before it, with the accumulators donated.

`autopar.cost_models.pipeline` simulates the same lists with times.
"""

from autopar.schedules.checker import CHECKS, check
from autopar.schedules.instructions import Instruction, Kind, Op, parse
from autopar.schedules.orders import REPEATING, Size
from autopar.schedules.pipeline import Pipeline, Schedule, issue_order, parse_schedule, peak_stash, weight_versions
from autopar.schedules.table import SCHEDULES, ScheduleSpec, bounds, make

__all__ = [
    "CHECKS",
    "REPEATING",
    "SCHEDULES",
    "Instruction",
    "Kind",
    "Op",
    "Pipeline",
    "Schedule",
    "ScheduleSpec",
    "Size",
    "bounds",
    "check",
    "issue_order",
    "make",
    "parse",
    "parse_schedule",
    "peak_stash",
    "weight_versions",
]
