"""Parameters and state in few arrays.

An optimizer's state is sixty scalars and two arrays or more for each of the model's. A
GPU needs a kernel, and the host a buffer to hand over, for every one of them, which for
a small model is most of a step. So between steps parameters lie in one vector for each
dtype (`Flat`), and so does all that is shaped like them; and scalars in one vector for
each dtype (`Packed`).
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meka import tree
from meka.observation import Losses
from meka.probe import current, lagged
from meka.transport import difference, hessian_at_current, hessian_at_previous
from meka.tree import Array, PyTree

# Parameters of a network in which arithmetic, and not the number of operations, is what
# takes the time.
LARGE = 2**21
# What is known not to look at how parameters are arranged.
_OWN = (None, hessian_at_current, hessian_at_previous, difference, current, lagged)

Packed: TypeAlias = tuple[list[Array], list[Array]]


class Own(optax.GradientTransformationExtraArgs):
    """An optimizer that is ours as it stands, with nothing before or behind it.

    It does not see how coordinates are arranged in arrays.
    """

    # What it accepts ends where all is finite, if `tree.is_wide`.
    sound = True


@jax.tree_util.register_pytree_node_class
class Flat:
    """A pytree of arrays as one vector for each dtype of the parameters."""

    def __init__(self, vectors: dict[str, Any]) -> None:
        self.vectors = vectors

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        """For jax."""
        names = tuple(sorted(self.vectors))
        return tuple(self.vectors[name] for name in names), names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], vectors: tuple) -> "Flat":
        """For jax."""
        return cls(dict(zip(names, vectors, strict=True)))


class Flattener:
    """To and from `Flat`, for trees of the shapes of some parameters."""

    def __init__(self, params: PyTree) -> None:
        leaves, self.structure = jax.tree.flatten(params)
        self.shapes = [jnp.shape(x) for x in leaves]
        self.sizes = [jnp.size(x) for x in leaves]
        self.members: dict[str, list[int]] = {}
        for place, x in enumerate(leaves):
            self.members.setdefault(str(jnp.result_type(x)), []).append(place)

    def flat(self, whole: PyTree) -> Flat:
        """A tree of these shapes, in vectors."""
        leaves = self.structure.flatten_up_to(whole)
        return Flat(
            {
                name: jnp.concatenate([leaves[place].reshape(-1) for place in places])
                for name, places in self.members.items()
            }
        )

    def whole(self, flat: Flat) -> PyTree:
        """The tree again."""
        leaves: list[Any] = [None] * len(self.shapes)
        for name, places in self.members.items():
            ends, end = [], 0
            for place in places[:-1]:
                end += self.sizes[place]
                ends.append(end)
            # Backwards, a gradient is made of its pieces once, and not again by each
            # of the sums over it, which are then slower by far.
            vector = jax.lax.optimization_barrier(flat.vectors[name])
            pieces = jnp.split(vector, ends)
            for place, piece in zip(places, pieces, strict=True):
                leaves[place] = piece.reshape(self.shapes[place])
        return jax.tree.unflatten(self.structure, leaves)

    def of_flat(self, losses: Losses) -> Losses:
        """Losses as a function of flat parameters."""
        return lambda params, batch: losses(self.whole(params), batch)

    def carry(
        self, optimizer: Any, params: PyTree, state: PyTree
    ) -> tuple[Flat, PyTree]:
        """Parameters and their optimizer's state, flat."""
        flat = self.flat(params)

        def one(wanted: PyTree, given: PyTree) -> PyTree:
            return self.flat(given) if _is_flat(wanted) else given

        shape = jax.eval_shape(optimizer.init, flat)
        return flat, jax.tree.map(one, shape, state, is_leaf=_is_flat)

    def restore(self, flat: PyTree) -> PyTree:
        """Parameters or a state again as they were."""
        return jax.tree.map(
            lambda x: self.whole(x) if _is_flat(x) else x, flat, is_leaf=_is_flat
        )


def flattener(
    optimizer: object, params: PyTree, transport: object, probe: object
) -> Flattener | None:
    """For parameters that are better in vectors, where nobody sees how they are."""
    own = isinstance(optimizer, Own) and transport in _OWN and probe in _OWN
    return Flattener(params) if own and _is_better_flat(params) else None


def _is_better_flat(params: PyTree) -> bool:
    """Whether vectors are faster than many arrays, and nothing has to be gathered.

    That is on a lone GPU, where small arrays cost a kernel each. In large networks
    arithmetic is what takes the time, and a long vector takes long to compile.
    """
    several = len(jax.tree.leaves(params)) > 1
    return several and tree.accelerated() and tree.size(params) <= LARGE


def _is_flat(x: object) -> bool:
    return isinstance(x, Flat)


class Packer:
    """Scalars of a pytree in a vector for each dtype, its arrays as they are."""

    def __init__(self, like: PyTree) -> None:
        leaves, self.structure = jax.tree.flatten(like)
        members: dict[Any, list[int]] = {}
        self.others: list[int] = []
        for place, x in enumerate(leaves):
            plain = jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool
            if plain and jnp.ndim(x) == 0:
                members.setdefault(x.dtype, []).append(place)
            else:
                self.others.append(place)
        self.members = list(members.values())

    def pack(self, whole: PyTree) -> Packed:
        """A tree like the one given: vectors of scalars, and arrays."""
        leaves = self.structure.flatten_up_to(whole)
        vectors = [jnp.stack([leaves[k] for k in places]) for places in self.members]
        return vectors, [leaves[k] for k in self.others]

    def unpack(self, packed: Packed) -> PyTree:
        """The tree again."""
        vectors, arrays = packed
        return self._assemble(lambda which, k: vectors[which][k], arrays)

    def places(self) -> PyTree:
        """For every scalar a function that fetches it from the device."""

        def place(which: int, k: int) -> Callable[[list], Any]:
            return lambda vectors: np.asarray(vectors[which])[k]

        return self._assemble(place, self.others)

    def _assemble(self, scalar: Callable[[int, int], Any], arrays: list) -> PyTree:
        leaves: list[Any] = [None] * self.structure.num_leaves
        for which, places in enumerate(self.members):
            for k, place in enumerate(places):
                leaves[place] = scalar(which, k)
        for place, x in zip(self.others, arrays, strict=True):
            leaves[place] = x
        return jax.tree.unflatten(self.structure, leaves)
