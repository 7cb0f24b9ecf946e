"""Plans: what the compiler has decided, as a value that is saved, compared and printed.

    in     the solution of a planner
    out    Plan; its JSON; tables, pictures and reasons for people

`one_mesh` and `pipeline` make plans of solutions, `validation` checks those of files, `views` shows them. Read `record`
first, then `plan`.
"""
