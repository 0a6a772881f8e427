"""The library and the plain NumPy reference take the same 200 steps.

Under jit, scan and vmap at once, so these agree with running one at a time, too.
"""

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax.flatten_util import ravel_pytree

import meka
from meka.improvement import Rule

STEPS = 200
BATCH = 23  # in 5 groups of 5, 5, 5, 4 and 4 examples, or 3 of 8, 8 and 7

TRANSPORTS: dict[str, Callable] = {
    "hessian_at_current": meka.hessian_at_current,
    "hessian_at_previous": meka.hessian_at_previous,
    "difference": meka.difference,
}
PROBES = {"current": meka.current, "lagged": meka.lagged}
DIRECTIONS = {"steepest": meka.steepest, "adam_style": meka.adam_style()}


class Case(NamedTuple):
    """A problem in both languages, and how the optimizers are set up on it."""

    problem: reference.Problem
    losses: Callable[[Any, Any], jax.Array]
    start: Any
    batches: tuple[np.ndarray, ...]
    rules: dict[str, tuple[Rule, reference.Rule]]
    options: dict[str, Any]
    groups: int = 3
    noise_every: int = 1


def rules(step_size: float) -> dict:
    """All four. Those that overstep are halved, else rounding grows into chaos."""
    return {
        "probability": (
            meka.probability_of_improvement,
            reference.probability_of_improvement,
        ),
        "expected": (
            meka.scaled(meka.expected_improvement, 0.5),
            reference.scaled(reference.expected_improvement, 0.5),
        ),
        "quadratic": (
            meka.scaled(meka.quadratic, 0.5),
            reference.scaled(reference.quadratic, 0.5),
        ),
        "constant": (meka.constant(step_size), reference.constant(step_size)),
    }


def logistic() -> Case:
    def losses(params, batch):
        x, y = batch
        score = params["bias"] + jnp.tensordot(x, params["weights"], 1)
        return jax.nn.softplus(-y * score)

    rng = np.random.default_rng(1)
    x = rng.normal(size=(STEPS, BATCH, 4)) * [2, 1, 1, 0.5]
    score = x @ [1.0, -1.0, 0.5, 0.0] + 0.3
    y = np.where(rng.random(score.shape) < 1 / (1 + np.exp(-score)), 1.0, -1.0)
    start = {"bias": np.asarray(0.5), "weights": np.array([-0.5, 1, 1, 1])}
    return Case(reference.logistic(), losses, start, (x, y), rules(0.05), {}, 5)


def noisy_quadratic() -> Case:
    """Half the curvatures differ by example; the paper's prior; short averages."""

    def losses(params, batch):
        centre, hessian = batch
        away = ravel_pytree(params)[0][None] - centre
        return jnp.einsum("ni,nij,nj->n", away, hessian, away) / 2

    rng = np.random.default_rng(2)
    root = rng.normal(size=(STEPS, BATCH, 4, 4)) / 3
    root = root + np.diag([2.0, 1.0, 0.5, 0.2])
    centre = rng.normal(size=(STEPS, BATCH, 4))
    start = [np.array([3.0, -4.0]), {"last": np.array([[2.0, 5.0]])}]
    both = {
        "scaled": (
            meka.scaled(meka.probability_of_improvement, 0.5),
            reference.scaled(reference.probability_of_improvement, 0.5),
        ),
        "schedule": (
            meka.constant(lambda count: 0.05 / (1 + count.astype(float))),
            reference.constant(lambda count: 0.05 / (1 + count)),
        ),
        "switch": (
            meka.switch(meka.constant(0.02), meka.expected_improvement, 50),
            reference.switch(
                reference.constant(0.02), reference.expected_improvement, 50
            ),
        ),
    }
    options = {
        "prior_variance": 1e4,
        "value_decay": 0.9,
        "noise_decay": 0.95,
        "model_decay": 0.9,
    }
    batches = (centre, np.einsum("tnij,tnkj->tnik", root, root))
    return Case(reference.noisy_quadratic(), losses, start, batches, both, options)


def rosenbrock() -> Case:
    """Curvature of both signs, and the third-order term of App. B.2."""

    def losses(params, batch):
        (noise,) = batch
        first = 1 + noise[:, 0] - params[0]
        second = params[1] - params[0] ** 2 + noise[:, 1]
        return first**2 + 5.0 * second**2

    noise = 0.3 * np.random.default_rng(3).normal(size=(STEPS, BATCH, 2))
    start = np.array([0.0, 1.5])
    half = {
        "scaled": (
            meka.scaled(meka.probability_of_improvement, 0.5),
            reference.scaled(reference.probability_of_improvement, 0.5),
        ),
        "constant": (meka.constant(0.005), reference.constant(0.005)),
    }
    options = {"third_order": 1e-3, "model_decay": 0.5, "value_decay": 0.99}
    return Case(reference.rosenbrock(5.0), losses, start, (noise,), half, options)


def single_precision() -> Case:
    """The first problem with rules that do not amplify rounding."""
    stable = {
        "scaled": (
            meka.scaled(meka.probability_of_improvement, 0.5),
            reference.scaled(reference.probability_of_improvement, 0.5),
        ),
        "constant": (meka.constant(0.05), reference.constant(0.05)),
    }
    return logistic()._replace(rules=stable, groups=2)


def now_and_then() -> Case:
    """Noise is measured at each of the first five steps, and at every fifth."""
    return logistic()._replace(noise_every=5)


CASES = {
    f.__name__: f
    for f in (logistic, noisy_quadratic, rosenbrock, single_precision, now_and_then)
}


def chosen(index: jax.Array, functions: list[Callable]) -> Callable:
    """The index-th function: one compiled program serves all combinations."""

    def call(*args):
        outcomes = [f(*args) for f in functions]
        return jax.tree.map(lambda *x: jnp.stack(x)[index], *outcomes)

    return call


@cache
def library(name: str, probe: str, diagonal: bool, dtype: str) -> dict:
    """The trajectories of every transport × rule × direction, in that order."""
    case = CASES[name]()
    rule_functions = [rule for rule, _ in case.rules.values()]
    start, batches = jax.tree.map(
        lambda x: jnp.asarray(x, dtype), (case.start, case.batches)
    )

    def run(transport, rule, direction):
        optimizer = optax.chain(
            meka.scale_by_meka(
                chosen(rule, rule_functions),
                chosen(direction, list(DIRECTIONS.values())),
                diagonal=diagonal,
                **case.options,
            ),
            optax.scale(-1.0),
        )
        step = meka.make_step(
            case.losses,
            optimizer,
            groups=case.groups,
            transport=chosen(transport, list(TRANSPORTS.values())),
            probe=PROBES[probe],
            noise_every=case.noise_every,
        )

        def body(carry, batch):
            params, state, info = step(*carry, batch)
            belief = meka.find_state(state).gradient
            variance = belief.variance
            record = {
                "params": ravel_pytree(params)[0],
                "mean": ravel_pytree(belief.mean)[0],
                "variance": ravel_pytree(variance)[0] if diagonal else variance,
                "model": jnp.stack(info.model[:6]),
            }
            return (params, state), {**info._asdict(), **record}

        return jax.lax.scan(body, (start, optimizer.init(start)), batches)[1]

    sizes = len(TRANSPORTS), len(rule_functions), len(DIRECTIONS)
    indices = np.array(list(product(*map(range, sizes))), np.int32).T
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(run))(*indices))


def plain(
    name: str, probe: str, diagonal: bool, transport: str, rule: str, direction: str
) -> dict[str, np.ndarray]:
    case = CASES[name]()
    start = np.concatenate([np.ravel(x) for x in jax.tree.leaves(case.start)])
    optimizer = reference.Reference(
        case.problem,
        start,
        transport=transport,
        probe=probe,
        rule=case.rules[rule][1],
        direction=direction,
        diagonal=diagonal,
        groups=case.groups,
        noise_every=case.noise_every,
        **case.options,
    )
    records = [
        optimizer.step(tuple(part[t] for part in case.batches)) for t in range(STEPS)
    ]
    return {key: np.array([r[key] for r in records]) for key in records[0]}


def errors(found: dict, expected: dict) -> dict[str, float]:
    """The largest error of each quantity, relative to its size at its step.

    Slopes and model errors are differences of larger numbers, and are held against
    those.
    """
    worst = {}
    for key, value in expected.items():
        axes = () if key == "model" else tuple(range(1, value.ndim))
        size = np.max(np.abs(value), axis=axes, initial=1e-200, keepdims=True)
        if key == "slope":
            size = size + np.median(np.abs(value))
        if key == "model_error":
            size = size + expected["value_variance"]
        worst[key] = float(np.max(np.abs(found[key] - value) / size))
    return worst


def combinations(*runs: tuple[str, str, bool], marks=()) -> list:
    """Every transport × rule × direction of these problems, probes, covariances."""
    parameters = []
    for name, probe, diagonal in runs:
        case = CASES[name]()
        choices = product(TRANSPORTS, case.rules, DIRECTIONS)
        for index, choice in enumerate(choices):
            covariance = "diagonal" if diagonal else "isotropic"
            label = "-".join((name, probe, covariance, *choice))
            parameters.append(
                pytest.param(
                    name, probe, diagonal, index, choice, id=label, marks=marks
                )
            )
    return parameters


@pytest.mark.parametrize(
    ("name", "probe", "diagonal", "index", "choice"),
    [
        *combinations(
            *(
                ("logistic", probe, diagonal)
                for probe in PROBES
                for diagonal in (False, True)
            ),
            ("noisy_quadratic", "lagged", True),
            ("rosenbrock", "current", False),
            ("now_and_then", "current", False),
        ),
        *combinations(
            ("rosenbrock", "lagged", False),
            ("now_and_then", "lagged", False),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_double_precision(name, probe, diagonal, index, choice, x64):
    found = library(name, probe, diagonal, "float64")
    expected = plain(name, probe, diagonal, *choice)
    found = {key: found[key][index] for key in (*expected, "rejected", "accepted")}
    assert found["accepted"].all()
    assert found["rejected"][-1] == 0
    assert found["params"].dtype == np.float64
    worst = errors(found, expected)
    # Where a step is nearly a sign, rounding grows from step to step.
    chaotic = name == "noisy_quadratic" and choice[2] == "adam_style"
    # Slopes and curvatures over very short steps have lost digits of their own.
    short = name == "rosenbrock" and probe == "lagged"
    assert max(worst.values()) < (1e-4 if chaotic else 1e-5 if short else 1e-7), worst


@pytest.mark.parametrize(
    ("name", "probe", "diagonal", "index", "choice"),
    combinations(
        ("single_precision", "current", False), ("single_precision", "lagged", True)
    ),
)
def test_single_precision(name, probe, diagonal, index, choice):
    found = library(name, probe, diagonal, "float32")
    expected = plain(name, probe, diagonal, *choice)
    found = {key: found[key][index] for key in expected}
    assert found["params"].dtype == np.float32
    worst = errors(found, expected)
    # Variances from two groups that nearly agree have no relative accuracy, and a
    # difference of gradients at a distance of 1e-4 has three digits in float32.
    kept = ("params", "mean", "variance", "value", "step_size", "gain")
    tolerance = 5e-2 if choice[0] == "difference" and probe == "lagged" else 2e-3
    assert max(worst[key] for key in kept) < tolerance, worst


def test_problems_exercise_the_edges():
    """Else the agreement above would say little about the branches of the rules."""
    bent = plain("rosenbrock", "current", False, "difference", "scaled", "adam_style")
    assert (bent["curvature"] < 0).any()
    assert (bent["model"][:, 5] > 0).all()
    idle = plain("noisy_quadratic", "lagged", True, "difference", "scaled", "steepest")
    assert (idle["step_size"] == 0).any()
    assert (idle["displacement_norm"][1:] == 0).any()
    assert (idle["model_error"] > 0).any()
    far = plain("rosenbrock", "lagged", False, "difference", "scaled", "steepest")
    assert far["overshot"][-1] > 0


@pytest.mark.parametrize(
    "problem", [logistic, noisy_quadratic, rosenbrock], ids=lambda f: f.__name__
)
def test_derivatives_by_hand(problem, x64):
    """The reference's own derivatives, against finite differences and JAX."""
    case = problem()
    start, unravel = ravel_pytree(jax.tree.map(jnp.asarray, case.start))
    theta = np.asarray(start) + 0.1
    batch = tuple(part[0] for part in case.batches)

    def losses(vector: jax.Array) -> jax.Array:
        return case.losses(unravel(vector), jax.tree.map(jnp.asarray, batch))

    close = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
    close(case.problem.losses(theta, batch), losses(jnp.asarray(theta)))
    close(case.problem.gradients(theta, batch), jax.jacrev(losses)(theta))
    close(case.problem.hessians(theta, batch), jax.hessian(losses)(theta))
