"""Graphs and geometry: jraph's GraphNetwork on padded batches of graphs, e3nn-jax's irreps."""

from __future__ import annotations

import e3nn_jax as e3nn
import flax.linen as nn
import jax
import jax.numpy as jnp
import jraph
import numpy as np
import optax

from tests.corpus.data import normal


def _graphs(count):
    """A padded batch of `count` random graphs, labels for each."""
    rng = np.random.default_rng(0)
    graphs = []
    for _ in range(count):
        nodes, edges = int(rng.integers(3, 7)), int(rng.integers(4, 9))
        graphs.append(
            jraph.GraphsTuple(
                nodes=rng.standard_normal((nodes, 8)).astype(np.float32),
                edges=rng.standard_normal((edges, 4)).astype(np.float32),
                senders=rng.integers(0, nodes, edges),
                receivers=rng.integers(0, nodes, edges),
                n_node=np.array([nodes]),
                n_edge=np.array([edges]),
                globals=np.zeros((1, 1), np.float32),
            )
        )
    batch = jraph.pad_with_graphs(jraph.batch_np(graphs), 8 * count, 8 * count + 8, count + 8)
    batch = jax.tree.map(jnp.asarray, batch)
    return batch, jnp.asarray(rng.integers(0, 2, (count + 8, 1)), jnp.float32)


class GraphNet(nn.Module):
    @nn.compact
    def __call__(self, graph):
        def mlp(width):
            return nn.Sequential([nn.Dense(width), nn.relu, nn.Dense(width), nn.LayerNorm()])

        graph = jraph.GraphMapFeatures(
            embed_edge_fn=nn.Dense(16), embed_node_fn=nn.Dense(16), embed_global_fn=nn.Dense(16)
        )(graph)
        for _ in range(2):
            update_edge = jraph.concatenated_args(mlp(16))
            update_node = jraph.concatenated_args(mlp(16))
            update_global = jraph.concatenated_args(mlp(16))
            net = jraph.GraphNetwork(
                update_edge_fn=update_edge, update_node_fn=update_node, update_global_fn=update_global
            )
            graph = net(graph)
        return graph._replace(globals=nn.Dense(1)(graph.globals))


def graph_network(scale=1):
    """Molecule classification as in the OGB example: masked loss over a padded batch."""
    net, optimizer = GraphNet(), optax.adam(1e-3)
    graphs, labels = _graphs(8 * scale)
    params = net.init(jax.random.key(0), graphs)

    def train_step(params, opt_state, graphs, labels):
        def loss_fn(params):
            logits = net.apply(params, graphs).globals
            mask = jraph.get_graph_padding_mask(graphs)[:, None]
            losses = optax.sigmoid_binary_cross_entropy(logits, labels)
            return jnp.sum(losses * mask) / jnp.sum(mask)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    return train_step, (params, optimizer.init(params), graphs, labels)


def graph_attention(scale=1):
    """Semi-supervised node classification: GAT layers over one graph, softmax over the edges of a node."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, graph):
            for width in (16, 7):
                query = nn.Dense(width)
                attention = nn.Dense(1)
                layer = jraph.GAT(
                    attention_query_fn=query,
                    attention_logit_fn=lambda q, k, e, attention=attention: attention(
                        nn.leaky_relu(jnp.concatenate([q, k], axis=-1))
                    ),
                    node_update_fn=lambda nodes: nn.elu(nodes),
                )
                graph = layer(graph)
            return graph.nodes

    nodes, edges = 64 * scale, 256 * scale
    rng = np.random.default_rng(1)
    graph = jraph.GraphsTuple(
        nodes=normal(nodes, 12),
        edges=None,
        senders=jnp.asarray(rng.integers(0, nodes, edges), jnp.int32),
        receivers=jnp.asarray(rng.integers(0, nodes, edges), jnp.int32),
        n_node=jnp.array([nodes]),
        n_edge=jnp.array([edges]),
        globals=None,
    )
    labels = jnp.asarray(rng.integers(0, 7, nodes), jnp.int32)
    mask = jnp.asarray(rng.integers(0, 2, nodes), bool)
    net, optimizer = Net(), optax.adam(5e-3)
    params = net.init(jax.random.key(0), graph)

    def update(params, opt_state, graph, labels, mask):
        def loss_fn(params):
            losses = optax.softmax_cross_entropy_with_integer_labels(net.apply(params, graph), labels)
            return jnp.mean(losses, where=mask)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    return update, (params, optimizer.init(params), graph, labels, mask)


class Equivariant(nn.Module):
    @nn.compact
    def __call__(self, positions, senders, receivers):
        vectors = positions[receivers] - positions[senders]
        harmonics = e3nn.spherical_harmonics("0e + 1o + 2e", e3nn.IrrepsArray("1o", vectors), normalize=True)
        lengths = jnp.sqrt(jnp.sum(vectors**2, -1) + 1e-6)
        radial = e3nn.bessel(lengths, 6, 3.0)
        features = e3nn.IrrepsArray("8x0e", jnp.ones((positions.shape[0], 8), positions.dtype))
        for irreps in (e3nn.Irreps("8x0e + 4x1o + 2x2e"), e3nn.Irreps("4x0e")):
            messages = e3nn.tensor_product(features[senders], harmonics).filter(keep=irreps)
            weights = e3nn.flax.MultiLayerPerceptron([16, messages.irreps.num_irreps], jax.nn.silu)(radial)
            summed = e3nn.scatter_sum(messages * weights, dst=receivers, output_size=positions.shape[0])
            features = e3nn.flax.Linear(irreps)(summed / 2.0)
            if irreps.lmax > 0:
                features = e3nn.scalar_activation(features, [jax.nn.silu, None, None])
        return features.array


def equivariant_energy(scale=1):
    """A tensor-product network: energies of molecules, forces as their gradients."""
    atoms = 8 * 4 * scale
    rng = np.random.default_rng(2)
    positions = normal(atoms, 3)
    base = np.repeat(np.arange(atoms), 4)
    senders = jnp.asarray(base, jnp.int32)
    receivers = jnp.asarray(base // 4 * 4 + rng.integers(1, 4, atoms * 4) % 4, jnp.int32)
    receivers = jnp.where(receivers == senders, senders // 4 * 4 + (senders + 1) % 4, receivers)
    net, optimizer = Equivariant(), optax.adam(1e-2)
    params = net.init(jax.random.key(0), positions, senders, receivers)
    energies, forces = normal(atoms // 4), normal(atoms, 3, seed=3)

    def step(params, opt_state, positions, senders, receivers, energies, forces):
        def loss_fn(params):
            def energy(positions):
                each = net.apply(params, positions, senders, receivers).sum(-1)
                per_molecule = each.reshape(-1, 4).sum(-1)
                return per_molecule.sum(), per_molecule

            minus_forces, predicted = jax.grad(energy, has_aux=True)(positions)
            return jnp.mean((predicted - energies) ** 2) + jnp.mean((minus_forces + forces) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    return step, (params, optimizer.init(params), positions, senders, receivers, energies, forces)
