"""Trains a byte-level GPT on 8 virtual CPU devices, with `@autopar.parallelize` as the only change to the train step.

    python examples/train_gpt.py [3M | 10M] [--steps N] [--seconds S]

The text is the source of Python's own standard library, so nothing is downloaded; every tenth file is held out. The
program shows the plan, compares the collectives that the plan predicts with those that XLA emits, trains, and ends with
two checks, each on a line of its own:

    the held-out loss is at least 0.5 nats below the unigram entropy of the text        `report_learning`
    three parallel steps equal three steps of plain `jax.jit` on a single device        `report_equality`

It exits with 1 when either fails. Everything between the two rules below is an ordinary JAX program.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

import autopar
from autopar.ir.collective import Collective

Tree = Any
Batch = dict[str, np.ndarray]

# ---------------------------------------------------------------------------------------------------------------- model


@dataclass(frozen=True)
class Config:
    """A pre-norm GPT: `layers` blocks of `width` and `heads`, trained on `batch` sequences of `seq` bytes a step.

    Training ends after `steps`, or after `seconds` on a machine too slow for them.
    """

    layers: int
    width: int
    heads: int
    batch: int
    seq: int
    learning_rate: float
    steps: int
    seconds: float
    vocab: int = 256


SIZES = {
    "TOY": Config(layers=2, width=32, heads=8, batch=64, seq=32, learning_rate=2e-2, steps=100, seconds=60.0),
    "3M": Config(layers=4, width=256, heads=8, batch=16, seq=128, learning_rate=2e-3, steps=300, seconds=110.0),
    "10M": Config(layers=6, width=384, heads=8, batch=16, seq=128, learning_rate=1e-3, steps=400, seconds=600.0),
}


def init_params(config: Config, key: jax.Array) -> Tree:
    """Normal matrices of deviation 0.02, of 0.5 for the embedding, and unit scales; one dict per block.

    The residual stream thus starts out as the byte itself, and pairs of bytes are learnt in the first dozens of steps.
    """
    width, head = config.width, config.width // config.heads
    block = {
        "qkv": (width, 3, config.heads, head),
        "out": (config.heads, head, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    shapes = {
        "embed": (config.vocab, width),
        "positions": (config.seq, width),
        "blocks": [block] * config.layers,
        "head": (width, config.vocab),
    }
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda node: isinstance(node, tuple))
    keys = jax.random.split(key, len(leaves))
    params = tree.unflatten([0.02 * jax.random.normal(k, shape) for k, shape in zip(keys, leaves, strict=True)])
    for layer in params["blocks"]:
        layer |= {"norm1": jnp.ones(width), "norm2": jnp.ones(width)}
    return params | {"embed": 25 * params["embed"], "norm": jnp.ones(width)}


def normalise(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Root mean square normalisation of x [..., D]."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale


def attend(params: Tree, x: jax.Array) -> jax.Array:
    """Causal self-attention of x [B,S,D]."""
    q, k, v = jnp.moveaxis(jnp.einsum("bsd,dchk->bschk", x, params["qkv"]), 2, 0)
    scores = jnp.einsum("bshk,bthk->bhst", q, k) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    return jnp.einsum("bhst,bthk,hkd->bsd", weights, v, params["out"])


def loss_fn(params: Tree, batch: Batch) -> jax.Array:
    """Mean cross-entropy (nats) of the next byte; tokens and labels are int32[B,S]."""
    x = params["embed"][batch["tokens"]] + params["positions"]
    for block in params["blocks"]:
        x = x + attend(block, normalise(x, block["norm1"]))
        x = x + jax.nn.gelu(normalise(x, block["norm2"]) @ block["up"]) @ block["down"]
    logits = normalise(x, params["norm"]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def make_training(config: Config, steps: int) -> tuple[Callable[..., Tree], Any]:
    """(init_state, train_step) with AdamW, a short warm-up and a cosine decay over `steps`."""
    rate = optax.warmup_cosine_decay_schedule(
        0.1 * config.learning_rate, config.learning_rate, max(1, steps // 20), steps, 0.1 * config.learning_rate
    )
    optimizer = optax.adamw(rate, weight_decay=0.01)

    def init_state(key: jax.Array) -> Tree:
        params = init_params(config, key)
        return {"params": params, "opt": optimizer.init(params)}

    @autopar.parallelize
    def train_step(state: Tree, batch: Batch) -> tuple[Tree, dict[str, jax.Array]]:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    return init_state, train_step


# ----------------------------------------------------------------------------------------------------------------- text


@dataclass(frozen=True)
class Text:
    """Bytes to learn from and to be judged on, uint8[n] each."""

    train: np.ndarray
    held_out: np.ndarray

    @property
    def unigram_entropy(self) -> float:
        """Nats per byte of the best model that knows only how frequent each byte is."""
        counts = np.bincount(np.concatenate([self.train, self.held_out]), minlength=256)
        share = counts[counts > 0] / counts.sum()
        return float(-(share * np.log(share)).sum())


def read_text() -> Text:
    """The standard library's own source files, in the order of their names, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests"}
    names: list[str] = []
    for folder, inner, file_names in os.walk(root):
        inner[:] = [name for name in inner if name not in left_out]
        names += [(Path(folder) / name).relative_to(root).as_posix() for name in file_names if name.endswith(".py")]
    files = [(root / name).read_bytes() for name in sorted(names)]
    held_out = files[9::10]
    train = [text for index, text in enumerate(files) if index % 10 != 9]
    return Text(*(np.frombuffer(b"".join(part), np.uint8) for part in (train, held_out)))


def batches(data: np.ndarray, config: Config, seed: int) -> Iterator[Batch]:
    """Batches of windows that start anywhere in `data`; one seed, one sequence of batches."""
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(data) - config.seq, size=config.batch)
        windows = data[starts[:, None] + np.arange(config.seq + 1)].astype(np.int32)
        yield {"tokens": windows[:, :-1], "labels": windows[:, 1:]}


def take(stream: Iterator[Batch], count: int) -> list[Batch]:
    """The next `count` batches."""
    return [next(stream) for _ in range(count)]


# --------------------------------------------------------------------------------------------------------------- checks

COMPARED_STEPS = 3
LOSS_TOLERANCE = 1e-5  # relative, float32
PARAMETER_TOLERANCE = (
    1e-3  # of a leaf's largest entry: Adam turns the rounding of a gradient near 0 into a part of a step
)
NEEDED_NATS = 0.5


@dataclass(frozen=True)
class Snapshot:
    """What a run had after `COMPARED_STEPS`: the losses, and the parameters as host arrays."""

    losses: list[float]
    params: Tree


def single_device_run(
    step: Callable[..., Any], init_state: Callable[..., Tree], key: jax.Array, data: list[Batch]
) -> Snapshot:
    """The same steps on device 0, by plain `jax.jit`."""
    with jax.default_device(jax.devices()[0]):
        state, losses = jax.jit(init_state)(key), []
        jitted = jax.jit(step, donate_argnums=0)
        for batch in data:
            state, metrics = jitted(state, batch)
            losses.append(float(metrics["loss"]))
    return Snapshot(losses, jax.device_get(state["params"]))


def report_learning(loss: float, entropy: float) -> tuple[bool, str]:
    """Whether the model learnt more than how frequent each byte is."""
    ok = entropy - loss >= NEEDED_NATS
    return ok, (
        f"held-out loss {loss:.2f} nats, {entropy - loss:.2f} below the unigram entropy {entropy:.2f} "
        f"(needed {NEEDED_NATS:.2f}): {'ok' if ok else 'FAILED'}"
    )


def report_equality(parallel: Snapshot, single: Snapshot) -> tuple[bool, str]:
    """Whether the parallel steps computed what a single device computes."""
    loss = max(abs(a - b) / abs(b) for a, b in zip(parallel.losses, single.losses, strict=True))
    distance = jax.tree.map(lambda a, b: float(np.abs(a - b).max() / np.abs(b).max()), parallel.params, single.params)
    params = max(jax.tree.leaves(distance))
    ok = loss <= LOSS_TOLERANCE and params <= PARAMETER_TOLERANCE
    return ok, (
        f"{COMPARED_STEPS} parallel steps equal the single-device run: loss within {loss:.1e} (allowed "
        f"{LOSS_TOLERANCE:.0e}), parameters within {params:.1e} of their largest entry (allowed "
        f"{PARAMETER_TOLERANCE:.0e}): {'ok' if ok else 'FAILED'}"
    )


# ---------------------------------------------------------------------------------------------------------- collectives


def totals(collectives: Iterable[Collective]) -> dict[tuple[str, str], tuple[int, int]]:
    """(source line, kind) -> executions and bytes per device and step."""
    executions_and_bytes: dict[tuple[str, str], tuple[int, int]] = {}
    for piece in collectives:
        key = (piece.source, piece.kind)
        count, size = executions_and_bytes.get(key, (0, 0))
        executions_and_bytes[key] = (count + piece.count, size + piece.count * piece.bytes)
    return executions_and_bytes


def collective_table(report: autopar.Report) -> Table:
    """What the plan predicts beside what XLA emitted, for each line of the program, the largest first."""
    figures = (Column(name, justify="right") for name in ("predicted", "MB", "compiled", "MB"))
    table = Table("line", "collective", *figures, title="collectives per step")
    none = (0, 0)
    predicted, compiled = totals(report.predicted), totals(report.collectives)
    order = sorted(predicted | compiled, key=lambda k: (-max(predicted.get(k, none)[1], compiled.get(k, none)[1]), k))
    for key in order:
        cells = [part for side in (predicted, compiled) for part in count_and_size(*side.get(key, none))]
        table.add_row(key[0] or "(none)", key[1], *cells)
    return table


def count_and_size(count: int, size: int) -> tuple[str, str]:
    """Two cells: executions, and megabytes per device."""
    return str(count), f"{size / 1e6:.3f}"


# ------------------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Meter:
    """Shows steps done, tokens per second and the training loss: a bar, and a line now and then for log files."""

    progress: Progress
    tokens_per_step: int
    steps: int

    def show(self, done: int, loss: float, seconds: float) -> None:
        """`seconds` since the first step ended, which also compiles and is left out of the rate."""
        rate = (done - 1) * self.tokens_per_step / seconds if done > 1 else 0.0
        self.progress.update(self.progress.task_ids[0], completed=done, rate=rate, loss=loss)
        if done % max(1, self.steps // 8) == 0:
            self.progress.console.print(f"  step {done:4d}  loss {loss:.3f}  {rate:,.0f} tokens/s")


def open_meter(config: Config, steps: int) -> Meter:
    """A meter for `steps` steps; its progress bar still has to be started."""
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
    )
    progress = Progress(*columns)
    progress.add_task("training", total=steps, rate=0.0, loss=float("nan"))
    return Meter(progress, config.batch * config.seq, steps)


def train(train_step: Any, state: Tree, data: Iterator[Batch], meter: Meter, seconds: float) -> tuple[Tree, Snapshot]:
    """Runs the meter's steps, fewer when `seconds` are over; also where the run stood after `COMPARED_STEPS`."""
    losses: list[float] = []
    snapshot, started, warm = Snapshot([], None), time.monotonic(), 0.0
    with meter.progress:
        for done in range(1, meter.steps + 1):
            state, metrics = train_step(state, next(data))
            losses.append(float(metrics["loss"]))  # waits for the step
            now = time.monotonic()
            warm = warm or now
            meter.show(done, losses[-1], now - warm)
            if done == COMPARED_STEPS:
                snapshot = Snapshot(losses[:], autopar.gather(state["params"]))
            if now - started > seconds and done >= COMPARED_STEPS:
                meter.progress.console.print(f"  stopped after {done} of {meter.steps} steps: {seconds:.0f} s are over")
                break
    return state, snapshot


def held_out_loss(params: Tree, text: Text, config: Config) -> float:
    """Mean loss (nats) over fixed windows of the held-out files, on one device."""
    params, evaluate = jax.device_put(params, jax.devices()[0]), jax.jit(loss_fn)
    return float(np.mean([evaluate(params, batch) for batch in take(batches(text.held_out, config, seed=1), 16)]))


def describe(params: Tree, text: Text) -> str:
    """One line on what is about to be trained."""
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    return (
        f"GPT with {count:,} parameters on {jax.device_count()} devices; "
        f"{len(text.train) / 1e6:.1f} MB of text to learn from, {len(text.held_out) / 1e6:.1f} MB held out"
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on 8 virtual devices.")
    parser.add_argument("size", nargs="?", default="3M", type=str.upper, choices=sorted(SIZES))
    parser.add_argument("--steps", type=int, help="training steps (default: by size)")
    parser.add_argument("--seconds", type=float, help="stop training after so many seconds (default: by size)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Runs the demonstration; 0 when both checks hold."""
    options = parse(arguments)
    config = SIZES[options.size]
    steps = max(COMPARED_STEPS, options.steps or config.steps)
    text = read_text()
    init_state, train_step = make_training(config, steps)
    key = jax.random.key(0)
    shapes = jax.eval_shape(init_state, key)
    print(describe(shapes["params"], text))

    first = take(batches(text.train, config, seed=0), COMPARED_STEPS)
    plan = train_step.plan(shapes, first[0])
    print(plan.summary())
    report = autopar.verify(plan, train_step, shapes, first[0], target="cpu")
    rich.print(collective_table(report), str(report), sep="\n")
    single = single_device_run(train_step.__wrapped__, init_state, key, first)

    state = train_step.init(init_state, key)  # born sharded: never whole on one device
    data = batches(text.train, config, seed=0)
    state, parallel = train(train_step, state, data, open_meter(config, steps), options.seconds or config.seconds)

    learnt, learning = report_learning(held_out_loss(state["params"], text, config), text.unigram_entropy)
    equal, equality = report_equality(parallel, single)
    print(learning, equality, sep="\n")
    return 0 if learnt and equal else 1


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(main())
