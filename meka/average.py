"""Exponential moving average without the bias of its start."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from meka.tree import Array, PyTree, scalar_dtype


class Average(NamedTuple):
    """A bias-corrected exponential moving average of a pytree.

    ``total`` starts at zero and ``weight`` counts how much of it has been filled,
    so that ``mean`` is right from the first entry on, as in Adam.
    """

    total: PyTree
    weight: Array

    @classmethod
    def like(cls, entry: PyTree) -> "Average":
        """An empty average for entries of this structure."""
        total = jax.tree.map(jnp.zeros_like, entry)
        return cls(total, jnp.zeros((), scalar_dtype(entry)))

    def add(
        self,
        entry: PyTree,
        decay: float,
        seen: Array | bool = True,
        restart: Array | bool = False,
    ) -> "Average":
        """The average after one more entry.

        Where nothing was seen the mean stays and only ages, so that what comes next
        weighs as much as if the same had been seen all along. With ``restart`` all
        that came before is forgotten.
        """
        keep = jnp.where(restart, 0, decay).astype(self.weight.dtype)
        fresh = jnp.where(seen, 1 - decay, 0).astype(self.weight.dtype)
        total = jax.tree.map(
            lambda t, x: keep.astype(t.dtype) * t + fresh.astype(t.dtype) * x,
            self.total,
            entry,
        )
        return Average(total, keep * self.weight + fresh)

    @property
    def mean(self) -> PyTree:
        """The bias-corrected average; zero while empty."""
        weight = jnp.where(self.weight > 0, self.weight, 1)
        return jax.tree.map(lambda t: t / weight.astype(t.dtype), self.total)

    @property
    def empty(self) -> Array:
        """Whether nothing was added yet."""
        return self.weight <= 0
