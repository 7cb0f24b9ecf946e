"""`autopar bench gpipe`: autopar's 1F1B pipeline against GPipe written by hand, the same GPT on 8 virtual CPU devices.

Four stages of two devices, eight microbatches, what a stage keeps recomputed by both. By hand, as Huang et al. (2019)
is usually written in JAX:

    shard_map over (stage, data)      every device runs the same program on its layers and its examples   -> _gradients
    scan over ticks                   stage s works on microbatch t - s                                   -> _tick
    ppermute                          sends activations on; its transpose sends cotangents back
    jax.checkpoint                    around the work of a stage
    psum, once, after the scan        of gradients over data, and over stages of what all of them hold

Layers are stacked, one row per stage; embedding and head are on all stages and worked on by the first and the last. The
optimizer runs on pieces in place. Both steps are compared with the step of one device; then they take turns.

As it is usually written, a stage works in every tick, on zeros where it has no microbatch. It may skip these ticks, by
a `cond` that has no collectives in it, which helps where devices share cores: then a bubble costs nothing, and what is
compared is overhead. autopar's step takes its turns with both.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar import jax_compat, zoo
from autopar.bench import worker
from autopar.bench.pipelines.simulated import Clock
from autopar.bench.step import Variant, take_turns
from autopar.compile import plan_step
from autopar.ir.text import seconds
from autopar.options import settings
from autopar.runtime.planned_step import PlannedStep
from autopar.runtime.single_program import PipelineRunner
from autopar.zoo import gpt
from autopar.zoo.layers import nn

STAGES, DATA, MICROBATCHES = 4, 2, 8
MODEL = "gpt-3m"
#: With these a pass of one microbatch takes 25 ms and more on two cores.
SIZES: Mapping[str, Any] = {"layers": 4, "batch": 128, "seq": 128}
#: Pipelines by hand -> whether they skip ticks.
HANDS = {"gpipe": False, "gpipe that skips": True}
TOLERANCE = 1e-4  # of the losses of two steps in float32

Row = dict[str, Any]
Tree = Any


# By hand


@dataclass(frozen=True)
class GPipe:
    """A GPT on a mesh of stages x data.

    Attributes:
        mesh: with axes "stage" and "data".
        microbatches: parts of the batch.
        seq: tokens of an example.
        skips: whether stages skip ticks in which they have no microbatch.
        dtype: of parameters and activations.
        optimizer: what the model's own step has.
    """

    mesh: Mesh
    microbatches: int
    seq: int
    skips: bool = False
    dtype: str = "float32"
    optimizer: optax.GradientTransformation = field(default_factory=lambda: optax.adamw(3e-4))

    @property
    def stages(self) -> int:
        return self.mesh.shape["stage"]

    def stacked(self, params: Tree) -> Tree:
        """Parameters of the model with its layers stacked [stages, layers per stage, ...]."""
        blocks = jax.tree.map(lambda *xs: jnp.stack(xs).reshape(self.stages, -1, *xs[0].shape), *params["blocks"])
        return {**params, "blocks": blocks}

    def specs(self, tree: Tree) -> Tree:
        """Stacked layers cut by stage, all else whole, of parameters or of the optimizer's state."""

        def spec(path: Any, _: Any) -> PartitionSpec:
            return PartitionSpec("stage") if "blocks" in jax.tree_util.keystr(path) else PartitionSpec()

        return jax.tree_util.tree_map_with_path(spec, tree)

    def init(self, params: Tree) -> Tree:
        """The state of a model with these parameters, in place."""
        state = {"params": self.stacked(params)}
        state["opt"] = self.optimizer.init(state["params"])
        return jax.device_put(jax.tree.map(jnp.copy, state), self._shardings(state))

    def _shardings(self, tree: Tree) -> Tree:
        return jax.tree.map(lambda s: NamedSharding(self.mesh, s), self.specs(tree))

    def compiled(self, state: Tree) -> Callable[[Tree, Tree], tuple[Tree, Tree]]:
        """(state, batch) -> (state, {"loss"}), the state donated."""
        where, batch = self._shardings(state), NamedSharding(self.mesh, PartitionSpec("data"))
        return jax.jit(self._step, in_shardings=(where, batch), out_shardings=(where, None), donate_argnums=0)

    def _step(self, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        specs = self.specs(state["params"])
        examples = PartitionSpec("data")
        gradients = jax.shard_map(
            self._gradients,
            mesh=self.mesh,
            in_specs=(specs, {"tokens": examples, "labels": examples}),
            out_specs=(PartitionSpec(), specs),
            check_vma=False,
        )
        loss, grads = gradients(state["params"], batch)
        updates, opt = self.optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    def _gradients(self, params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        """Loss and gradients on one device: of its own examples, then added up."""
        cut = jax.tree.map(lambda x: x.reshape(self.microbatches, -1, *x.shape[1:]), batch)
        loss, grads = jax.value_and_grad(self._loss)(params, cut)
        over = {name: "data" if name == "blocks" else ("stage", "data") for name in grads}
        data = self.mesh.shape["data"]
        grads = {name: jax.tree.map(lambda g: g / data, jax.lax.psum(grads[name], over[name])) for name in grads}
        return jax.lax.psum(loss, ("stage", "data")) / data, grads

    def _loss(self, params: Tree, cut: Tree) -> jax.Array:
        """Of the last stage, the mean loss of this device's examples; of the others 0."""
        start = jnp.zeros((cut["tokens"].shape[1], self.seq, params["embed"].shape[1]), self.dtype)
        ticks = jnp.arange(self.microbatches + self.stages - 1)
        _, losses = jax.lax.scan(partial(self._tick, params, cut), start, ticks)
        return losses.sum() / self.microbatches

    def _tick(self, params: Tree, cut: Tree, x: jax.Array, tick: jax.Array) -> tuple[jax.Array, jax.Array]:
        stage = jax.lax.axis_index("stage")
        number = tick - stage
        works = (number >= 0) & (number < self.microbatches)
        at = jnp.clip(number, 0, self.microbatches - 1)
        microbatch = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, at, 0, False), cut)
        x, loss = jax.checkpoint(self._work)(params, microbatch, x, stage, works)
        return jax.lax.ppermute(x, "stage", [(s, s + 1) for s in range(self.stages - 1)]), loss

    def _work(
        self, params: Tree, microbatch: Tree, x: jax.Array, stage: jax.Array, works: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """A stage on one microbatch, or on none."""
        first, last = works & (stage == 0), works & (stage == self.stages - 1)
        x = jax.lax.cond(first, lambda x: gpt.embed(params, microbatch["tokens"], self.dtype), lambda x: x, x)
        layers = partial(self._layers, params["blocks"])
        x = jax.lax.cond(works, layers, lambda x: x, x) if self.skips else layers(x)
        none = jnp.zeros((), self.dtype)
        loss = jax.lax.cond(last, lambda x: gpt.next_token_loss(params, x, microbatch["labels"]), lambda x: none, x)
        return x, loss

    def _layers(self, blocks: Tree, x: jax.Array) -> jax.Array:
        mask = nn.causal_bias(self.seq, self.dtype)
        for layer in range(jax.tree.leaves(blocks)[0].shape[1]):
            x = gpt.block(jax.tree.map(lambda a, layer=layer: a[0, layer], blocks), x, mask)
        return x


# Measuring


def ours(model: zoo.Model) -> PlannedStep:
    """autopar's plan: as many stages and microbatches, everything recomputed."""
    options = {
        "stages": STAGES,
        "mesh": (STAGES * DATA,),
        "num_microbatches": MICROBATCHES,
        "schedule": "1f1b",
        "remat": "full",
    }
    return plan_step(model.step, model.abstract_args(), {}, settings(options), local=True)


def work(spec: Mapping[str, Any]) -> Iterator[Row]:
    """The row."""
    worker.cpu_devices(STAGES * DATA)
    model = zoo.build(MODEL, **SIZES)
    batches = [jax.tree.map(np.asarray, model.make_batch(jax.random.key(i))) for i in range(2)]
    state = model.init(jax.random.key(0))
    expected = _losses(jax.jit(model.step), state, batches)
    prepared = ours(model)
    step = prepared.build()
    staged, tree = PipelineRunner(prepared.plan, step, step.argument_shardings, ()), prepared.traced.out_tree

    def run(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        return jax.tree.unflatten(tree, staged(jax.tree.leaves((state, batch))))

    mesh = jax_compat.auto_mesh(np.array(jax.devices()).reshape(STAGES, DATA), ("stage", "data"))
    losses = {"autopar": _losses(run, state, batches)}
    variants = [Variant("autopar", run, state)]
    for name, skips in HANDS.items():
        hand = GPipe(mesh, MICROBATCHES, SIZES["seq"], skips)
        rival = hand.compiled(hand.init(state["params"]))
        losses[name] = _losses(rival, hand.init(state["params"]), batches)
        variants.append(Variant(name, rival, hand.init(state["params"])))
    take_turns(variants, batches, spec["repeats"])
    clock = Clock()
    clock.start()
    variants[0].state, _ = replace(step, blocking=True, observer=clock)(variants[0].state, batches[0])
    passes = {k: [clock.median("run", k, s) for s in range(STAGES)] for k in "FB"}
    yield row(variants, expected, losses, passes, [s.submesh for s in prepared.plan.stages])


def _losses(step: Callable[..., Any], state: Tree, batches: list[Tree]) -> list[float]:
    """Of two steps in a row: the second sees what the first has changed."""
    losses: list[float] = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


def row(
    variants: list[Variant],
    expected: list[float],
    losses: Mapping[str, list[float]],
    passes: Mapping[str, list[float]],
    submeshes: list[Any],
) -> Row:
    """Medians, ratio, losses beside those of one device, and raw times."""
    times = {v.name: v.times for v in variants}
    medians = {name: statistics.median(t) for name, t in times.items()}
    error = {
        n: max(abs(a - b) / abs(b) for a, b in zip(step_losses, expected, strict=True))
        for n, step_losses in losses.items()
    }
    return {
        "model": MODEL,
        "sizes": dict(SIZES),
        "stages": STAGES,
        "microbatches": MICROBATCHES,
        "submeshes": [dict(s) for s in submeshes],
        "median_s": medians,
        "ratio": {name: medians["autopar"] / medians[name] for name in HANDS},
        "paired_ratio": {
            name: statistics.median(a / b for a, b in zip(times["autopar"], times[name], strict=True)) for name in HANDS
        },
        "pass_s": dict(passes),
        "cores": os.cpu_count(),
        "loss_error": error,
        "ok": max(error.values()) <= TOLERANCE,
        "raw_s": times,
    }


def run(repeats: int) -> Row:
    """The comparison; WorkerError where its process dies."""
    (row,) = worker.lines("autopar.bench.pipelines.gpipe", {"repeats": repeats}, worker.KEEP)
    return row


def table(row: Row) -> str:
    """A few lines."""
    medians, passes = row["median_s"], row["pass_s"]
    return "\n".join(
        [
            *(
                f"{name:<22}{seconds(medians[name])}, autopar's step over it {row['ratio'][name]:.3f}, "
                f"in pairs {row['paired_ratio'][name]:.3f}"
                for name in HANDS
            ),
            f"autopar, 1f1b         {seconds(medians['autopar'])}",
            f"passes of stages      {'; '.join(f'{k} ' + ' '.join(map(seconds, t)) for k, t in passes.items())}",
            "losses of two steps   "
            + ", ".join(f"{name} within {error:.1e} of one device" for name, error in row["loss_error"].items()),
        ]
    )


if __name__ == "__main__":
    worker.serve(work)
