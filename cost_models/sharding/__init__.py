"""What costs depend on: the strategies of a program's op groups, as plain data that passes make and cost models read.

    in     nothing: the passes `autopar.passes.op_groups` and `autopar.passes.intra_op` make the values
    out    StrategySet: layouts of one op group; Grouping: groups, bindings and uses; Model: the problem and its meaning

Read `strategies` first, then `groups`.
"""
