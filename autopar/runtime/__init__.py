"""Runtime: runs a train step in stages on submeshes, in the order of a schedule.

step = build(traced, stages, schedule, meshes)      compile          -> pipeline.py, programs.py
state, metrics = step(state, batch)                 run              -> pipeline.py
"""

from autopar.runtime.executor import PipelineStep
from autopar.runtime.pipeline import build

__all__ = ["PipelineStep", "build"]
