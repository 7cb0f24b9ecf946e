"""`autopar bench equal`: parallel steps beside the single-device step, over the zoo.

    in     models, planners, meshes and, for pipelines, schedules
    out    the largest difference of every case, and the FLOPs of every device

Read `run` first.

run               cases on one mesh, in worker processes
case              one model under one planner on one mesh
flops             FLOPs per device from the compiled program
pipeline          cases in stages
pipeline_case     one model in stages under one schedule
"""
