"""Named axes: haliax tensors under Equinox, penzai models with their variables unbound."""

from __future__ import annotations

import jax
import optax

from tests.corpus.data import tokens


def haliax_transformer(scale=1):
    """A decoder layer with named attention, as Levanter writes them."""
    import equinox as eqx
    import haliax as hax
    import haliax.nn as hnn

    Batch, Pos, KeyPos = hax.Axis("batch", 8 * scale), hax.Axis("position", 16), hax.Axis("key_position", 16)
    Vocab, Embed = hax.Axis("vocab", 64), hax.Axis("embed", 32)
    Heads, HeadSize, Mlp = hax.Axis("heads", 4), hax.Axis("head_size", 8), hax.Axis("mlp", 128)

    class Block(eqx.Module):
        norm1: hnn.LayerNorm
        norm2: hnn.LayerNorm
        qkv: hnn.Linear
        out: hnn.Linear
        up: hnn.Linear
        down: hnn.Linear

        @staticmethod
        def init(key):
            keys = jax.random.split(key, 4)
            three = hax.Axis("qkv", 3)
            return Block(
                hnn.LayerNorm.init(Embed),
                hnn.LayerNorm.init(Embed),
                hnn.Linear.init(Embed, (three, Heads, HeadSize), key=keys[0], use_bias=False),
                hnn.Linear.init((Heads, HeadSize), Embed, key=keys[1]),
                hnn.Linear.init(Embed, Mlp, key=keys[2]),
                hnn.Linear.init(Mlp, Embed, key=keys[3]),
            )

        def __call__(self, x):
            q, k, v = self.qkv(self.norm1(x)).unbind("qkv")
            k, v = k.rename({"position": "key_position"}), v.rename({"position": "key_position"})
            mask = hnn.attention.causal_mask(Pos, KeyPos)
            attended = hnn.attention.dot_product_attention(KeyPos, HeadSize, q, k, v, mask=mask)
            x = x + self.out(attended)
            return x + self.down(hnn.gelu(self.up(self.norm2(x))))

    class Model(eqx.Module):
        embed: hnn.Embedding
        block: Block
        head: hnn.Linear

        def __call__(self, ids):
            return self.head(self.block(self.embed(ids)))

    keys = jax.random.split(jax.random.key(0), 3)
    model = Model(
        hnn.Embedding.init(Vocab, Embed, key=keys[0]), Block.init(keys[1]), hnn.Linear.init(Embed, Vocab, key=keys[2])
    )
    params, static = eqx.partition(model, eqx.is_inexact_array)
    optimizer = optax.adamw(1e-3)
    ids, targets = tokens(8 * scale, 16, below=64), tokens(8 * scale, 16, below=64, seed=1)

    def train_step(params, opt_state, ids, targets):
        def loss_fn(params):
            model = eqx.combine(params, static)
            logits = model(hax.named(ids, (Batch, Pos)))
            labels = hax.nn.one_hot(hax.named(targets, (Batch, Pos)), Vocab)
            return hnn.cross_entropy_loss(logits, Vocab, labels).mean().scalar()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return eqx.apply_updates(params, updates), opt_state, loss

    return train_step, (params, optimizer.init(params), ids, targets)


def penzai_mlp(scale=1):
    """penzai's MLP, parameters frozen into a tree of their values."""
    from penzai import pz
    from penzai.models import simple_mlp

    model = simple_mlp.MLP.from_config(
        name="mlp", init_base_rng=jax.random.key(0), feature_sizes=[16, 64, 64, 4], activation_fn=jax.nn.silu
    )
    graph, variables = pz.unbind_params(model)
    frozen = {variable.label: variable.freeze() for variable in variables}
    values = {label: variable.value for label, variable in frozen.items()}
    optimizer = optax.adam(1e-3)
    batch = {"x": jax.random.normal(jax.random.key(1), (16 * scale, 16)), "y": tokens(16 * scale, below=4)}

    def train_step(values, opt_state, batch):
        def loss_fn(values):
            bound = pz.bind_variables(
                graph, [pz.ParameterValue(value=v, label=label, metadata={}) for label, v in values.items()]
            )
            logits = bound(pz.nx.wrap(batch["x"]).tag("batch", "features")).unwrap("batch", "features")
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(values)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(values, updates), opt_state, loss

    return train_step, (values, optimizer.init(values), batch)
