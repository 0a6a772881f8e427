"""A small decoder-only transformer as an equinox module.

Pre-normalised blocks (Xiong et al. 2020), learned positions, and one matrix that both
reads tokens and predicts them. It maps whole batches of token sequences to logits with
batched operations, and no sequence sees another.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import optax


class LayerNorm(eqx.Module):
    """Layer normalisation over the last axis; scale one, shift zero."""

    scale: jax.Array
    shift: jax.Array

    def __init__(self, width: int):
        self.scale = jnp.ones(width, jnp.float32)
        self.shift = jnp.zeros(width, jnp.float32)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise each position by itself."""
        x = x - jnp.mean(x, -1, keepdims=True)
        variance = jnp.mean(x * x, -1, keepdims=True)
        return x * jax.lax.rsqrt(variance + 1e-5) * self.scale + self.shift


class Block(eqx.Module):
    """Causal attention, then a network on each position; both added to what came in."""

    before_attention: LayerNorm
    before_network: LayerNorm
    to_attention: jax.Array  # queries, keys and values at once
    from_attention: jax.Array
    widen: jax.Array
    narrow: jax.Array
    heads: int = eqx.field(static=True)

    def __init__(self, key: jax.Array, width: int, heads: int, depth: int):
        keys = jax.random.split(key, 4)
        # GPT-2: what is added to the stream shrinks with the number of additions.
        small = 0.02 / (2 * depth) ** 0.5
        normal = jax.random.normal
        self.before_attention, self.before_network = LayerNorm(width), LayerNorm(width)
        self.to_attention = 0.02 * normal(keys[0], (width, 3 * width))
        self.from_attention = small * normal(keys[1], (width, width))
        self.widen = 0.02 * normal(keys[2], (width, 4 * width))
        self.narrow = small * normal(keys[3], (4 * width, width))
        self.heads = heads

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map (n, length, width) to the same."""
        x = x + self._attend(self.before_attention(x)) @ self.from_attention
        hidden = jax.nn.gelu(self.before_network(x) @ self.widen)
        return x + hidden @ self.narrow

    def _attend(self, x: jax.Array) -> jax.Array:
        n, length, width = x.shape
        mixed = (x @ self.to_attention).reshape(n, length, 3, self.heads, -1)
        query, key, value = mixed[:, :, 0], mixed[:, :, 1], mixed[:, :, 2]
        scores = jnp.einsum("nqhc,nkhc->nhqk", query, key)
        scores = scores / (width // self.heads) ** 0.5
        causal = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1)
        seen = jnp.einsum("nhqk,nkhc->nqhc", weights, value)
        return seen.reshape(n, length, width)


class Transformer(eqx.Module):
    """Tokens (n, length) to the logits of each next token (n, length, vocabulary)."""

    tokens: jax.Array
    positions: jax.Array
    blocks: list[Block]
    last: LayerNorm

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Every position sees itself and what came before."""
        x = self.tokens[tokens] + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.last(x) @ self.tokens.T


def transformer(
    key: jax.Array,
    *,
    vocabulary: int = 256,
    length: int = 128,
    width: int = 320,
    depth: int = 8,
    heads: int = 5,
) -> Transformer:
    """A transformer; the default has ten million parameters."""
    keys = jax.random.split(key, depth + 2)
    return Transformer(
        tokens=0.02 * jax.random.normal(keys[0], (vocabulary, width)),
        positions=0.02 * jax.random.normal(keys[1], (length, width)),
        blocks=[Block(k, width, heads, depth) for k in keys[2:]],
        last=LayerNorm(width),
    )


def next_token_losses(model: Transformer, text: jax.Array) -> jax.Array:
    """Mean cross entropy of each sequence's next tokens: (n, length + 1) to (n,)."""
    logits = model(text[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:])
    return jnp.mean(losses, axis=1)
