"""The compiler's passes: frozen values in, frozen values out. No pass knows a device, a plan file or JAX's runtime.

    microbatch/    which operations run once per block of the batch
    layers/        the layers of a step, and scans over layers cut into pieces
    op_groups/     operations that share one strategy variable, their strategies, and which values follow them
    intra_op/      one strategy per group on one mesh: the problem, its solution as shardings, the plan of a mesh
    solver/        exact methods for that problem: bounds, elimination, ILP
    memory/        the same within a memory budget: constraints, cutting planes, search
    remat/         what the backward pass recomputes, and state in the host's memory
    stages/        a step cut into stages, each planned on its submesh
    inter_op/      layers into stages, submeshes, microbatches and a schedule

Read `intra_op/build.py` first, then `inter_op/search.py`.
"""
