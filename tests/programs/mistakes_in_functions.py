"""Mistakes in functions and their arguments, one row each as in `tests.programs.mistakes`."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

import autopar
from autopar.api import parallelize
from autopar.errors import (
    ArgumentError,
    DonatedError,
    MeshError,
    MicrobatchError,
    PinError,
    TraceError,
)
from tests.programs.mistaken import (
    DROPOUT,
    LINE,
    Counter,
    Leaky,
    Mistakes,
    NoPytree,
    W,
    X,
    appends,
    branches,
    closes_over_a_tracer,
    composes,
    converts,
    counts,
    donated_twice,
    drops_its_update,
    gathered_after_donation,
    in_state,
    mapped_over,
    maps_its_batch,
    maps_twice,
    masks,
    mutable,
    mutates,
    planned,
    prints_in_order,
    product,
    sums_over_its_mesh,
    use_of_a_leak,
    uses_numpy,
)
from tests.programs.steps import array

FUNCTIONS: Mistakes = (
    # Batches, donation, static arguments
    (
        "batch that does not divide",
        lambda: planned(args=(W, array(9, 8)), batch_argnums=1),
        ArgumentError,
        rf"batch argument 'x' of shape \(9, 8\), read at {LINE}, does not divide by any mesh axis \(8\)\. .*",
    ),
    (
        "batch argument that is not there",
        lambda: planned(batch_argnums=2),
        ArgumentError,
        r"batch_argnums=\(2,\): product has no traced argument 2",
    ),
    (
        "positions that are no numbers",
        lambda: planned(static_argnums="auto"),
        ArgumentError,
        r"static_argnums='auto' must be positions of positional arguments",
    ),
    (
        "negative positions",
        lambda: planned(donate_argnums=-1),
        ArgumentError,
        r"donate_argnums=-1 must be positions of positional arguments, 0 or more",
    ),
    (
        "donated argument that is not there",
        lambda: planned(donate_argnums=7),
        ArgumentError,
        r"donate_argnums=\(7,\): there is no traced argument 7",
    ),
    (
        "donated array used again",
        donated_twice,
        DonatedError,
        r"'state/w' of shape \(8, 8\) was donated to an earlier step and its memory reused\. Use the state .*",
    ),
    (
        "static argument that cannot be hashed",
        lambda: planned(lambda w, sizes: w, (W, [1, 2]), static_argnums=1),
        ArgumentError,
        r"static argument 1 of <lambda> must be hashable, it is list \[1, 2\] \(unhashable type: 'list'\)",
    ),
    (
        "static argument with arrays",
        lambda: planned(lambda model, x: model(x), (eqx.nn.Linear(8, 8, key=jax.random.key(0)), X), static_argnums=0),
        ArgumentError,
        r"static argument 0 of <lambda> is Linear, a pytree with arrays: .* Leave it out of static_argnums; .*",
    ),
    (
        "static module of NNX",
        lambda: planned(lambda model, x: model(x), (nnx.Linear(8, 8, rngs=nnx.Rngs(0)), X), static_argnums=0),
        ArgumentError,
        r"static argument 0 of <lambda> is the object Linear of Flax NNX: .* Leave it out of static_argnums; .*",
    ),
    (
        "shard_map in stages",
        lambda: planned(sums_over_its_mesh, stages=2),
        ArgumentError,
        rf"shard_map at {LINE} runs over the mesh \{{'x': 8\}}, .* is not available with stages=2\. Leave .*",
    ),
    (
        "shard_map in microbatches",
        lambda: planned(maps_its_batch, num_microbatches=2),
        MicrobatchError,
        rf".* shard_map at {LINE} does not run on a part of the batch: sub at {LINE} in its body reads a total .*",
    ),
    (
        "shard_map over another mesh",
        lambda: planned(mapped_over((2, 4), ("rows", "columns"), P("rows")), (X,), mesh={"data": 2, "model": 4}),
        MeshError,
        rf"shard_map at {LINE} runs over the mesh \{{'rows': 2, 'columns': 4\}}, and the mesh to plan for is "
        r"\{'data': 2, 'model': 4\}\. Axes, sizes and their order must be the same: leave out mesh=, or .*",
    ),
    (
        "shard_map over another size",
        lambda: planned(mapped_over((2, 4), ("x", "y"), P("x")), (X,), mesh=(8,)),
        MeshError,
        rf"shard_map at {LINE} runs over the mesh \{{'x': 2, 'y': 4\}}, and the mesh to plan for is \(8,\)\. Axes, .*",
    ),
    (
        "shard_maps over two meshes",
        lambda: planned(maps_twice, (X,), mesh=None),
        MeshError,
        rf"shard_map at {LINE} runs over the mesh \{{'x': 8\}}, and that at {LINE} over \{{'x': 2, 'y': 4\}}: .*",
    ),
    (
        "shard_map against the order of the mesh",
        lambda: planned(mapped_over((2, 4), ("x", "y"), P(("y", "x"))), (X,), mesh=None),
        PinError,
        rf"operand 0 of shard_map at {LINE}: .* over 'y' before 'x'; use \('x', 'y'\), or a mesh with 'y' before 'x'",
    ),
    # Arguments that are changed, and what is none
    (
        "a module that is no argument",
        lambda: planned(lambda x: DROPOUT(x), (X,)),
        TraceError,
        rf"<lambda> changes an object of Flax that is no argument of it at {LINE}: Cannot mutate RngCount .* Pass .*",
    ),
    (
        "an update that is not returned",
        lambda: planned(drops_its_update, ({"w": W}, X)),
        TraceError,
        rf"drops_its_update writes float32\[8,8\] into its argument 'state/w' at {LINE} and neither .* Return it, .*",
    ),
    (
        "a list that grows",
        lambda: planned(appends, ([], X)),
        TraceError,
        rf"appends writes float32\[16,8\] into its argument 'history/0' at {LINE} and neither returns nor uses it\. .*",
    ),
    (
        "an object that counts",
        lambda: Counter().step(X),
        TraceError,
        r"step sets the attribute 'count' of 'self' \(Counter\), which happens once, while it is traced, .*",
    ),
    (
        "a mean over the axis of pmap",
        lambda: planned(lambda x: jax.lax.pmean(x, "devices"), (X,)),
        TraceError,
        rf"<lambda> communicates over a named axis that is not there at {LINE}: .*: devices\. Remove pmean, .*",
    ),
    # Arguments that are no arrays
    (
        "a set among the arrays",
        in_state({1}),
        ArgumentError,
        r"argument 'state/extra' is set \{1\}, which is no array; pass arrays .*static_argnums",
    ),
    ("object among the arrays", in_state(NoPytree()), ArgumentError, r"argument 'state/extra' is NoPytree <.*"),
    (
        "array of objects",
        in_state(np.array([None])),
        ArgumentError,
        r"argument 'state/extra' is ndarray array\(\[None\], dtype=object\), which is no array; .*",
    ),
    (
        "masked array",
        in_state(np.ma.array([1.0], mask=[True])),
        ArgumentError,
        r"argument 'state/extra' is MaskedArray: numpy masked arrays are not supported .*filled.*",
    ),
    (
        "dict with keys of two kinds",
        lambda: planned(lambda state: state["w"], ({"w": W, 1: W},)),
        ArgumentError,
        r"the arguments are no pytree that JAX can flatten: .*'int' and 'str'",
    ),
    (
        "a call with shapes alone",
        lambda: parallelize(product, mesh=(8,))(*jax.eval_shape(lambda: (W, X))),
        ArgumentError,
        r"'w' is ShapeDtypeStruct\(shape=\(8, 8\), dtype=float32\); a call needs arrays\. .* use \.plan.*",
    ),
    (
        "number that no array holds",
        lambda: planned(args=(W, 10**30)),
        ArgumentError,
        r"argument 'x' is int 10{30}, which is no array; .*",
    ),
    (
        "argument of more bytes than can be counted",
        lambda: planned(lambda x: x * 2, (jax.ShapeDtypeStruct((2**60, 8), jnp.float32),)),
        ArgumentError,
        r"argument 'x' of <lambda> is f32\[1152921504606846976,8\], more than the 9\.0e\+15 bytes an array may have",
    ),
    (
        "result of more bytes than can be counted",
        lambda: planned(lambda x: jnp.sum(jnp.exp(x[:, None] + x)), (jax.ShapeDtypeStruct((2**31,), jnp.float32),)),
        ArgumentError,
        rf"the result of \w+ at {LINE} of <lambda> is f32\[2147483648,2147483648\], more than .*",
    ),
    (
        "whole values of what was donated",
        gathered_after_donation,
        DonatedError,
        r"an array of shape \(8, 8\) was donated to an earlier step and its memory reused\. Gather the state .*",
    ),
    (
        "no function to create a state",
        lambda: parallelize(product).init(None),
        ArgumentError,
        "init takes a function, got NoneType None",
    ),
    # Functions
    ("no function", lambda: parallelize(3), ArgumentError, "parallelize takes a function, got int 3"),
    ("no function to plan", lambda: autopar.plan("f"), ArgumentError, "plan takes a function, got str 'f'"),
    (
        "a function of pmap",
        lambda: parallelize(jax.pmap(product, axis_name="batch")),
        ArgumentError,
        r"parallelize takes a function of whole arrays, and product is made by jax\.pmap\. Give .*",
    ),
    (
        "branch on a traced value",
        lambda: planned(branches, (X,)),
        TraceError,
        rf"branches needs the value of a traced array at {LINE}: Attempted boolean conversion .* bool\[\]\. Use .*",
    ),
    (
        "float of a traced value",
        lambda: planned(converts, (X,)),
        TraceError,
        rf"converts needs the value of a traced array at {LINE}: .*float32\[\]\. Use jax\.lax .*",
    ),
    (
        "range over a traced value",
        lambda: planned(counts, (X,)),
        TraceError,
        rf"counts needs the value of a traced array at {LINE}: .*int32\[\]\. Use jax\.lax .*",
    ),
    (
        "static argument of a jitted function",
        lambda: planned(jax.jit(lambda x, n: x * n, static_argnums=1), (X, 3)),
        TraceError,
        r"<lambda> passes a traced value to a static argument of jax\.jit.*\. Name the argument in static_argnums .*",
    ),
    (
        "boolean mask of unknown length",
        lambda: planned(masks, (X,)),
        TraceError,
        rf"masks needs the value of a traced array at {LINE}: .*bool\[16,8\]\. Use .* jnp\.where.*",
    ),
    (
        "numpy on a traced value",
        lambda: planned(uses_numpy, (X,)),
        TraceError,
        rf"uses_numpy needs the value of a traced array at {LINE}: .*float32\[16,8\]\. Use .*",
    ),
    (
        "ordered side effects",
        lambda: planned(prints_in_order, (X,)),
        TraceError,
        rf"prints_in_order has ordered side effects \(.*\) at {LINE}, which JAX runs on one device only\. Use .*",
    ),
    (
        "leaked value",
        lambda: planned(Leaky().keep, (X,)),
        TraceError,
        rf"keep leaks a traced float32\[16,8\] computed at {LINE}: it was kept in a global, .* Return it instead\.",
    ),
    (
        "value leaked from a loop",
        lambda: planned(Leaky().keep_in_scan, (X,)),
        TraceError,
        rf"keep_in_scan leaks a traced float32\[16,8\] computed at {LINE}: .*",
    ),
    (
        "value leaked from a gradient",
        lambda: planned(Leaky().keep_in_gradient, (X,)),
        TraceError,
        rf"keep_in_gradient leaks a traced float32\[16,8\] computed at {LINE}: .*",
    ),
    (
        "use of a leaked value",
        use_of_a_leak,
        TraceError,
        r"use uses a traced float32\[16,8\] that is no argument of it: it was kept from an earlier trace, or .*",
    ),
    (
        "closing over a traced value",
        closes_over_a_tracer,
        TraceError,
        r"<lambda> uses a traced float32\[16,8\] that is no argument of it: .* Pass it as an argument\.",
    ),
    (
        "mutable array in an operation without a rule",
        lambda: planned(composes, (X,)),
        TraceError,
        rf"a mutable array is made at {LINE} \(new_ref\), and an operation takes it for which JAX has no rule\. Use .*",
    ),
    (
        "mutable array from outside",
        lambda: planned(mutates, (X,)),
        TraceError,
        rf"mutates uses a mutable array Ref\{{float32\[\]\}} that it does not make at {LINE}\. Pass its value, .*",
    ),
    (
        "mutable result",
        lambda: planned(mutable, (X,)),
        TraceError,
        r"mutable returns a mutable array Ref\{float32\[16,8\]\} at 'y'; return its value, ref\[\.\.\.\]",
    ),
    (
        "mutable argument",
        lambda: planned(lambda r: r[...] * 2, (jax.new_ref(X),)),
        ArgumentError,
        r"argument 'r' is a mutable array Ref\{float32\[16,8\]\}; pass its value, ref\[\.\.\.\]",
    ),
    (
        "result that is no array",
        lambda: planned(lambda x: {"y": (x, NoPytree())}, (X,)),
        TraceError,
        r"<lambda> returns NoPytree <.*> at 'y/1', which is no array; return arrays, numbers or None",
    ),
    (
        "a set of results",
        lambda: planned(lambda x: {1}, (X,)),
        TraceError,
        r"<lambda> returns set \{1\}, which is no .*",
    ),
)
