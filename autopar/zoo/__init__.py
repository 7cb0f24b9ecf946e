"""Models as plain functions, with a table of sizes: what the tests, the benchmarks and the command line plan.

    model = build("gpt-2.6b-scan", batch=64)
    state, batch = model.abstract_args()          # shapes only
    jaxpr = jax.make_jaxpr(model.step)(state, batch)

Each file is a family; `table` holds the names, `model` what an entry is, `nn` the layers they share.
"""

from autopar.zoo.model import Model
from autopar.zoo.table import TOYS, build, names

__all__ = ["TOYS", "Model", "build", "names"]
