"""Operations that share one strategy variable, and which values follow them.

    in     Graph, sharding rules, mesh
    out    Grouping: groups with their strategies, bindings of values to groups, uses where values change sharding

Read `strategies` first, then `bindings` and `merge`.
"""
