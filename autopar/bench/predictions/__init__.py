"""`autopar bench predictions`: the predicted peak memory beside the compiler's.

    in     models of the zoo, targets, meshes
    out    predicted and compiled bytes of every case, and their relative error

Read `run` first.

run          all cases, in worker processes
programs     programs that are not in the zoo: dropout, batch norm in half floats, padding masks
operations   train steps around operations that compilers treat in their own way
"""
