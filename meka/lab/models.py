"""The paper's networks (appendix E) as equinox modules.

A model maps a whole batch (n, ...) to logits (n, classes) with batched operations:
under vmap, convolutions become grouped ones, which are slow. No example's logits
depend on another example (group normalisation, not batch normalisation), since the
optimizer takes the examples' gradients as independent.

Everything is differentiable twice, in forward and reverse mode and nested.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.nn import initializers


class Dense(eqx.Module):
    """x W + b; W Glorot-uniform, b zero (as in DeepOBS)."""

    weight: jax.Array
    bias: jax.Array

    def __init__(self, key: jax.Array, inputs: int, outputs: int):
        self.weight = initializers.glorot_uniform()(key, (inputs, outputs), jnp.float32)
        self.bias = jnp.zeros(outputs, jnp.float32)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map (n, inputs) to (n, outputs)."""
        return x @ self.weight + self.bias[None]


class Conv(eqx.Module):
    """A convolution of NHWC images with an HWIO kernel; the bias, if any, is zero."""

    kernel: jax.Array
    bias: jax.Array | None
    stride: int = eqx.field(static=True)
    padding: str = eqx.field(static=True)

    def __init__(
        self,
        key: jax.Array,
        shape: tuple[int, int, int, int],
        init: initializers.Initializer,
        *,
        stride: int = 1,
        padding: str = "SAME",
        bias: bool = True,
    ):
        self.kernel = init(key, shape, jnp.float32)
        self.bias = jnp.zeros(shape[-1], jnp.float32) if bias else None
        self.stride = stride
        self.padding = padding

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map (n, h, w, inputs) to (n, h', w', outputs)."""
        y = lax.conv_general_dilated(
            x,
            self.kernel,
            (self.stride, self.stride),
            self.padding,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return y if self.bias is None else y + self.bias[None, None, None]


class GroupNorm(eqx.Module):
    """Group normalisation (Wu and He, 2018) of NHWC images; scale one, shift zero."""

    scale: jax.Array
    shift: jax.Array
    groups: int = eqx.field(static=True)
    epsilon: float = eqx.field(static=True)

    def __init__(self, channels: int, groups: int = 8, epsilon: float = 1e-5):
        if channels % groups:
            raise ValueError(f"{channels} channels do not split into {groups} groups")
        self.scale = jnp.ones(channels, jnp.float32)
        self.shift = jnp.zeros(channels, jnp.float32)
        self.groups = groups
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise every example by itself."""
        n, height, width, channels = x.shape
        split = (n, height * width, self.groups, channels // self.groups)
        grouped = x.reshape(split)
        centred = grouped - grouped.mean((1, 3), keepdims=True)
        variance = jnp.square(centred).mean((1, 3), keepdims=True)
        normal = (centred * lax.rsqrt(variance + self.epsilon)).reshape(x.shape)
        return normal * self.scale[None, None, None] + self.shift[None, None, None]


def max_pool(x: jax.Array) -> jax.Array:
    """Take the maximum over 3x3 windows with stride 2 and "same" padding, NHWC.

    Built from strided slices, first along the rows, then along the columns: XLA's own
    `reduce_window` has all the derivatives too, but its backward pass
    (select-and-scatter) took 3 to 4 times as long on the CPU.
    """
    return _max_along(_max_along(x, 1), 2)


def _max_along(x: jax.Array, axis: int) -> jax.Array:
    size = x.shape[axis]
    outputs = -(-size // 2)
    span = 2 * (outputs - 1)
    extra = span + 3 - size
    margins = [(0, 0, 0)] * x.ndim
    margins[axis] = (extra // 2, extra - extra // 2, 0)
    padded = lax.pad(x, jnp.array(-jnp.inf, x.dtype), margins)
    first, second, third = (
        lax.slice_in_dim(padded, start, start + span + 1, 2, axis) for start in range(3)
    )
    return jnp.maximum(jnp.maximum(first, second), third)


class MLP(eqx.Module):
    """Dense layers with ReLU between them."""

    layers: tuple[Dense, ...]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map (n, inputs) to (n, outputs)."""
        for layer in self.layers[:-1]:
            x = jax.nn.relu(layer(x))
        return self.layers[-1](x)


def mlp(key: jax.Array, sizes: Sequence[int] = (784, 100, 10)) -> MLP:
    """Build a perceptron with the given layer sizes."""
    if len(sizes) < 2:
        raise ValueError(f"sizes needs inputs and outputs, got {tuple(sizes)}")
    keys = jax.random.split(key, len(sizes) - 1)
    pairs = zip(keys, pairwise(sizes), strict=True)
    return MLP(tuple(Dense(k, inputs, outputs) for k, (inputs, outputs) in pairs))


class CNN3c3d(eqx.Module):
    """Three convolutions, each with ReLU and max-pooling, then three dense layers."""

    convolutions: tuple[Conv, ...]
    head: MLP

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map images (n, 32, 32, 3) to logits."""
        for convolution in self.convolutions:
            x = max_pool(jax.nn.relu(convolution(x)))
        return self.head(x.reshape(x.shape[0], -1))


def cnn_3c3d(key: jax.Array, classes: int = 10) -> CNN3c3d:
    """Build DeepOBS's 3c3d for 32x32 RGB images (Schneider et al., 2019).

    Kernels Glorot-normal, dense weights Glorot-uniform, biases zero, pooling with
    "same" padding, as there: 32 -> 28 -> 14 -> 12 -> 6 -> 6 -> 3 pixels a side.
    """
    first, second, third, head = jax.random.split(key, 4)
    init = initializers.glorot_normal()
    return CNN3c3d(
        (
            Conv(first, (5, 5, 3, 64), init, padding="VALID"),
            Conv(second, (3, 3, 64, 96), init, padding="VALID"),
            Conv(third, (3, 3, 96, 128), init, padding="SAME"),
        ),
        mlp(head, (3 * 3 * 128, 512, 256, classes)),
    )


class Autoencoder(eqx.Module):
    """Two convolutions down to a short code, two up again, by sub-pixels."""

    down: tuple[Conv, Conv]
    encode: Dense
    decode: Dense
    up: tuple[Conv, Conv]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map pixels (n, 784) to pixels.

        No sigmoid: with the squared error it stops learning once all is black.
        """
        n = x.shape[0]
        x = x.reshape(n, 28, 28, 1)
        for convolution in self.down:
            x = jax.nn.relu(convolution(x))
        shape = x.shape
        x = self.decode(self.encode(x.reshape(n, -1)))
        x = jax.nn.relu(x).reshape(shape)
        first, second = self.up
        x = _widen(second(jax.nn.relu(_widen(first(x)))))
        return x.reshape(n, -1)


def _widen(x: jax.Array) -> jax.Array:
    """Four channels become the four pixels of a square (Shi et al., 2016)."""
    n, height, width, channels = x.shape
    x = x.reshape(n, height, width, 2, 2, channels // 4)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(n, 2 * height, 2 * width, -1)


def autoencoder(key: jax.Array, *, width: int = 8, code: int = 16) -> Autoencoder:
    """Build an autoencoder for 28x28 images: 28 -> 14 -> 7 pixels a side, a code, back.

    Kernels and weights Glorot-uniform, biases zero.
    """
    keys = jax.random.split(key, 6)
    init, wide = initializers.glorot_uniform(), 2 * width
    return Autoencoder(
        down=(
            Conv(keys[0], (3, 3, 1, width), init, stride=2),
            Conv(keys[1], (3, 3, width, wide), init, stride=2),
        ),
        encode=Dense(keys[2], 7 * 7 * wide, code),
        decode=Dense(keys[3], code, 7 * 7 * wide),
        up=(
            Conv(keys[4], (3, 3, wide, 4 * width), init),
            Conv(keys[5], (3, 3, width, 4), init),
        ),
    )


class PreactivationBlock(eqx.Module):
    """x + conv(relu(norm(conv(relu(norm(x)))))) (He et al., 2016, "Identity mappings").

    Where the block halves the image and widens, the shortcut takes every second pixel
    and pads the new channels with zeros: no parameters, and the signal passes as is.
    """

    norms: tuple[GroupNorm, GroupNorm]
    convolutions: tuple[Conv, Conv]

    def __init__(self, key: jax.Array, inputs: int, outputs: int, stride: int):
        first, second = jax.random.split(key)
        init = initializers.he_normal()
        self.norms = (GroupNorm(inputs), GroupNorm(outputs))
        self.convolutions = (
            Conv(first, (3, 3, inputs, outputs), init, stride=stride, bias=False),
            Conv(second, (3, 3, outputs, outputs), init, bias=False),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map images to images."""
        residual = x
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            residual = convolution(jax.nn.relu(norm(residual)))
        stride = self.convolutions[0].stride
        shortcut = x[:, ::stride, ::stride]
        widen = residual.shape[-1] - x.shape[-1]
        shortcut = jnp.pad(shortcut, ((0, 0), (0, 0), (0, 0), (0, widen)))
        return shortcut + residual


class ResNet(eqx.Module):
    """Convolution, pre-activation blocks, norm, ReLU, global average, dense layer."""

    stem: Conv
    blocks: tuple[PreactivationBlock, ...]
    norm: GroupNorm
    head: Dense

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map images (n, 32, 32, 3) to logits."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(jax.nn.relu(self.norm(x)).mean((1, 2)))


def resnet32(
    key: jax.Array,
    classes: int = 10,
    *,
    widths: Sequence[int] = (16, 32, 64),
    blocks_per_stage: int = 5,
) -> ResNet:
    """Build the CIFAR ResNet-32: three stages of five blocks, 16, 32 and 64 wide.

    Kernels He-normal without bias, group normalisation in 8 groups, classifier
    Glorot-uniform with zero bias. The keywords make smaller relatives of it.
    """
    stem, head, *keys = jax.random.split(key, 2 + len(widths) * blocks_per_stage)
    blocks: list[PreactivationBlock] = []
    inputs = widths[0]
    for stage, outputs in enumerate(widths):
        for place in range(blocks_per_stage):
            stride = 2 if stage > 0 and place == 0 else 1
            block_key = keys[len(blocks)]
            blocks.append(PreactivationBlock(block_key, inputs, outputs, stride))
            inputs = outputs
    return ResNet(
        Conv(stem, (3, 3, 3, widths[0]), initializers.he_normal(), bias=False),
        tuple(blocks),
        GroupNorm(inputs),
        Dense(head, inputs, classes),
    )
