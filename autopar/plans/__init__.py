"""Plans: what the compiler has decided, as a value that is saved, compared and printed.

    in     the solution of a planner
    out    Plan; its JSON; tables, pictures and reasons for people

`builders` makes plans of solutions, `validation` checks those of files, `views` shows them. Read `record`
first, then `plan`.
"""
