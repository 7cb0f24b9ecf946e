"""Sharding rules of Pallas kernels, derived from the kernel, and the call on a part of its operands.

A kernel runs its body once for each point of a grid, the last axis fastest. Index maps say which block of an operand or
result a point reads or writes. Along a grid axis whose runs are independent, devices each do some of the runs on their
parts of the operands.

    places      what of a kernel depends on its place in the grid
    scratch     whether memory that all runs share is overwritten before it is read
    axes        the axes whose runs are independent
    splash      positions of queries in JAX's splash attention
    parts       the rule, and the call on parts

The parameters are those of JAX's `pallas_call` primitive (jax 0.10.2 and 0.12.0), read by attribute.
"""

from autopar.rules.pallas.axes import GridAxis as GridAxis
from autopar.rules.pallas.parts import bind_part as bind_part
from autopar.rules.pallas.parts import grid_axes as grid_axes
from autopar.rules.pallas.parts import obstacles as obstacles
from autopar.rules.pallas.parts import part_params as part_params
from autopar.rules.pallas.parts import rule as rule
from autopar.rules.pallas.parts import uncut_axes as uncut_axes
