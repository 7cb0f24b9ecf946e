"""Pipeline schedules: instruction lists, one per rank, and the proof that they are right.

    make(name, size)                    a Schedule from the table                         -> table.py
      order of passes on each rank      the published schedule, as a formula              -> orders.py
      complete lists                    transfers, sums, frees and updates follow         -> complete.py
    check(schedule, bounds)             complete, ready, acyclic, within its stash        -> checker.py
    Schedule.order                      one order of everything, to dispatch or to price  -> pipeline.py

What a runtime needs is in the lists (`instructions.py` says what each instruction means):

- One process walks `Schedule.order` and dispatches; several walk the same order, each taking the instructions of its
  own ranks. Send and receive of a value stand next to each other in it, so that they can be one program on both
  submeshes, and every process meets the transfers in the same order.
- Values between passes are named by (kind, stage, microbatch). A value for a stage on the same rank is not sent; it
  stays until that stage's pass of the same kind has read it.
- What a forward pass keeps for its backward pass (the stash) is given up by `free`, and so is what a backward pass
  keeps for the gradients of the weights. A received value belongs to the stash of the pass that reads it.
- `accumulate` may be fused into the pass before it, with the sums donated.

`autopar.cost_models.pipeline` plays the same lists with times.
"""

from autopar.schedules.checker import CHECKS, check
from autopar.schedules.instructions import Instruction, Kind, Op, parse
from autopar.schedules.orders import REPEATING, Size
from autopar.schedules.pipeline import Pipeline, Schedule, held, issue_order, parse_schedule, weight_versions
from autopar.schedules.table import SCHEDULES, Row, bounds, make

__all__ = [
    "CHECKS",
    "REPEATING",
    "SCHEDULES",
    "Instruction",
    "Kind",
    "Op",
    "Pipeline",
    "Row",
    "Schedule",
    "Size",
    "bounds",
    "check",
    "held",
    "issue_order",
    "make",
    "parse",
    "parse_schedule",
    "weight_versions",
]
