"""Runtime: runs a train step in stages on submeshes, in the order of a schedule.

step = build(traced, stages, schedule, meshes)      compile          -> pipeline.py, programs.py
state, metrics = step(state, batch)                 run              -> pipeline.py
layouts                                             on each submesh  -> layouts.py; `autopar.codegen.stages.shardings`
"""

from autopar.codegen.layouts import Layouts, data_parallel
from autopar.runtime.executor import PipelineStep
from autopar.runtime.pipeline import build

__all__ = ["Layouts", "PipelineStep", "build", "data_parallel"]
