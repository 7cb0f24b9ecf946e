"""The program as a target's compiler runs it: what it simplifies, fuses, and writes to memory, and in which order.

    in     Graph and `Backend` (which compiler)
    out    `steps.Program`: steps, with loops as nested lists

Read `flatten` first, then `simplifications`.
"""
