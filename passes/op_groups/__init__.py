"""Op groups: operations that share one strategy variable, and the bindings of values to groups.

    in     Graph, sharding rules, mesh
    out    Grouping: groups with their strategies, bindings of values to groups, uses where values may be resharded

Start with `strategies`, then read `bindings` and `merge`.
"""
