"""The whole algorithm in plain float64 NumPy, on problems differentiated by hand.

Written from the paper, to be read beside it: parameters are one vector, every
example has its own gradient and Hessian, averages are summed over their whole
history, and step sizes come from a bracketing root finder. No cleverness.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.polynomial import Polynomial
from scipy.optimize import root_scalar
from scipy.special import ndtr

Vector = np.ndarray
Batch = tuple[np.ndarray, ...]


class Problem(NamedTuple):
    """Per-example losses (n,), gradients (n, d) and Hessians (n, d, d)."""

    losses: Callable[[Vector, Batch], np.ndarray]
    gradients: Callable[[Vector, Batch], np.ndarray]
    hessians: Callable[[Vector, Batch], np.ndarray]


def logistic() -> Problem:
    """log(1 + exp(-y (bias + x'w))); theta = (bias, w), y is +1 or -1."""

    def inputs(x: np.ndarray) -> np.ndarray:
        return np.concatenate([np.ones((len(x), 1)), x], axis=1)

    def doubt(theta: Vector, batch: Batch) -> np.ndarray:
        x, y = batch
        return 1 / (1 + np.exp(y * (inputs(x) @ theta)))

    def losses(theta: Vector, batch: Batch) -> np.ndarray:
        x, y = batch
        return np.log1p(np.exp(-y * (inputs(x) @ theta)))

    def gradients(theta: Vector, batch: Batch) -> np.ndarray:
        x, y = batch
        return -(y * doubt(theta, batch))[:, None] * inputs(x)

    def hessians(theta: Vector, batch: Batch) -> np.ndarray:
        p, z = doubt(theta, batch), inputs(batch[0])
        return (p * (1 - p))[:, None, None] * z[:, :, None] * z[:, None, :]

    return Problem(losses, gradients, hessians)


def noisy_quadratic() -> Problem:
    """½ (theta - c)' H (theta - c), both c and H different for every example."""

    def losses(theta: Vector, batch: Batch) -> np.ndarray:
        centre, hessian = batch
        away = theta - centre
        return np.einsum("ni,nij,nj->n", away, hessian, away) / 2

    def gradients(theta: Vector, batch: Batch) -> np.ndarray:
        centre, hessian = batch
        return np.einsum("nij,nj->ni", hessian, theta - centre)

    def hessians(theta: Vector, batch: Batch) -> np.ndarray:
        return batch[1]

    return Problem(losses, gradients, hessians)


def rosenbrock(steepness: float) -> Problem:
    """(1 + e₁ - x)² + steepness (y - x² + e₂)², noise e in both parts."""

    def parts(theta: Vector, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        (noise,) = batch
        x, y = theta
        return 1 + noise[:, 0] - x, y - x**2 + noise[:, 1]

    def losses(theta: Vector, batch: Batch) -> np.ndarray:
        first, second = parts(theta, batch)
        return first**2 + steepness * second**2

    def gradients(theta: Vector, batch: Batch) -> np.ndarray:
        first, second = parts(theta, batch)
        along_x = -2 * first - 4 * steepness * theta[0] * second
        return np.stack([along_x, 2 * steepness * second], axis=1)

    def hessians(theta: Vector, batch: Batch) -> np.ndarray:
        _, second = parts(theta, batch)
        x = theta[0]
        hessian = np.empty((len(second), 2, 2))
        hessian[:, 0, 0] = 2 - 4 * steepness * second + 8 * steepness * x**2
        hessian[:, 0, 1] = hessian[:, 1, 0] = -4 * steepness * x
        hessian[:, 1, 1] = 2 * steepness
        return hessian

    return Problem(losses, gradients, hessians)


class Model(NamedTuple):
    """Along a direction: mean -ax + bx²/2, variance 2s + px² + qx⁴/4 + tx⁶."""

    slope: float
    curvature: float
    value_variance: float
    slope_variance: float
    curvature_variance: float
    third_order: float

    def mean(self) -> Polynomial:
        return Polynomial([0, -self.slope, self.curvature / 2])

    def variance(self) -> Polynomial:
        s, p, q, t = self[2:]
        return Polynomial([2 * s, 0, p, 0, q / 4, 0, t])


Rule = Callable[[Model, int], float]


def density(z):
    """Of the standard normal; `ndtr` is its integral."""
    return np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)


def zero_between(rate: Callable[[float], float], low: float, high: float) -> float:
    found: Any = root_scalar(
        rate, bracket=(low, high), method="brentq", xtol=1e-300, rtol=1e-15
    )
    return float(found.root)


def without_optimum(model: Model) -> float:
    """a/|b|, or where the deviations of slope and value are equal."""
    if model.curvature != 0:
        return model.slope / abs(model.curvature)
    if model.slope_variance == 0:
        return 0.0
    return np.sqrt(2 * model.value_variance / model.slope_variance)


def probability_of_improvement(model: Model, count: int = 0) -> float:
    """The zero of the derivative of mean/deviation, Eq. 13."""
    a, b, s, p, q, t = model
    if a <= 0:
        return 0.0
    if b <= 0 and q == 0 and t == 0:
        return without_optimum(model)
    if s == 0 and (b >= 0 or p == 0):
        return without_optimum(model)
    mean, variance = model.mean(), model.variance()
    # d/dx mean/√variance = (mean' variance - mean variance'/2) / variance^(3/2)
    rate = mean.deriv() * variance - mean * variance.deriv() / 2
    high = a / b if b > 0 else 1.0
    while rate(high) < 0:
        high *= 2
    low = high
    while rate(low) >= 0:
        low /= 2
    root = zero_between(rate, low, high)
    return min(root, 2 * a / -b) if b < 0 else root


def expected_improvement(model: Model, count: int = 0) -> float:
    """The zero of the derivative of E[max(0, decrease)] on (0, 2a/|b|]."""
    a, b = model.slope, model.curvature
    if a <= 0:
        return 0.0
    if b == 0:
        return without_optimum(model)
    end = 2 * a / abs(b)
    if all(v == 0 for v in model[2:]):
        return end / 2 if b > 0 else end
    mean, variance = model.mean(), model.variance()
    mean_rate, variance_rate = mean.deriv(), variance.deriv()

    def rate(x: float) -> float:
        """-mean' Φ(z) + deviation' φ(z) with z = -mean/deviation."""
        deviation = np.sqrt(variance(x))
        z = -mean(x) / deviation
        growth = variance_rate(x) / 2 / deviation
        return float(growth * density(z) - mean_rate(x) * ndtr(z))

    grid = end * np.arange(1, 2001) / 2000
    deviation = np.sqrt(variance(grid))
    z = -mean(grid) / deviation
    best = int(np.argmax(deviation * (density(z) + z * ndtr(z))))
    if best == len(grid) - 1:
        return end
    return zero_between(rate, grid[best - 1], grid[best + 1])


def quadratic(model: Model, count: int = 0) -> float:
    """The minimum of the mean."""
    return without_optimum(model) if model.slope > 0 else 0.0


def constant(step_size: float | Callable[[int], float]) -> Rule:
    return lambda model, count: step_size(count) if callable(step_size) else step_size


def scaled(rule: Rule, factor: float) -> Rule:
    return lambda model, count: factor * rule(model, count)


def switch(first: Rule, then: Rule, after: int) -> Rule:
    return lambda model, count: (first if count < after else then)(model, count)


def corrected_average(history: list, decay: float) -> np.ndarray | float:
    """Exponentially weighted mean of what was seen (not None), weights summing to one.

    An entry's age is counted in steps, whether or not something was seen at each.
    """
    ages = [age for age, x in enumerate(history[::-1]) if x is not None]
    seen = [x for x in history[::-1] if x is not None]
    weights = decay ** np.array(ages, float)
    return np.tensordot(weights / weights.sum(), np.asarray(seen), 1)


def recalled(measured: list) -> float:
    """What was measured, the last ten or so weighing most; nothing is zero."""
    return float(corrected_average(measured, 0.9)) if measured else 0.0


def kalman(prior_mean, prior_variance, seen, noise):
    """Gain, and mean and variance given an observation; infinity knows nothing."""
    if np.all(np.isinf(prior_variance)):
        gain = np.ones_like(prior_variance)
        return gain, seen, noise + 0 * gain
    gain = prior_variance / (prior_variance + noise)
    mean = (1 - gain) * prior_mean + gain * seen
    return gain, mean, (1 - gain) ** 2 * prior_variance + gain**2 * noise


@dataclass
class Reference:
    """One optimizer on one problem; `step` returns everything it computed."""

    problem: Problem
    theta: Vector
    transport: str
    probe: str
    rule: Rule
    direction: str
    diagonal: bool
    groups: int
    noise_every: int = 1
    value_decay: float = 0.999
    noise_decay: float = 0.999
    model_decay: float = 0.999
    prior_variance: float = np.inf
    third_order: float | None = None
    epsilon: float = 1e-8

    count: int = 0
    value_noises: list = field(default_factory=list)
    gradient_noises: list = field(default_factory=list)
    models: list = field(default_factory=list)

    def __post_init__(self) -> None:
        d = len(self.theta)
        self.previous = self.theta.copy()
        self.m, self.u, self.s = np.zeros(d), 0.0, self.prior_variance
        self.P = np.full(d if self.diagonal else (), self.prior_variance)
        self.direction_norm = 0.0
        self.held_noise, self.held_changes, self.held_bends = np.array(0.0), [], []
        self.overshoots, self.longest, self.bend = 0, 0.0, (0.0, 0.0)
        self.measuring_length = 1e-4 * (1 + np.linalg.norm(self.theta))

    def grouped(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean, and the variance of it from the means of groups i mod k."""
        n, k = len(x), self.groups
        mean = x.mean(axis=0)
        scatter = sum(
            len(x[j::k]) * (x[j::k].mean(axis=0) - mean) ** 2 for j in range(k)
        )
        return mean, np.asarray(scatter) / ((k - 1) * n)

    def shaped(self, variance: np.ndarray) -> np.ndarray:
        return variance if self.diagonal else np.asarray(variance.mean())

    def changes(self, batch: Batch, delta: Vector) -> np.ndarray:
        """Every example's change of the gradient over the last displacement."""
        if self.transport == "hessian_at_current":
            return self.problem.hessians(self.theta, batch) @ delta
        if self.transport == "hessian_at_previous":
            return self.problem.hessians(self.previous, batch) @ delta
        assert self.transport == "difference"
        after = self.problem.gradients(self.theta, batch)
        return after - self.problem.gradients(self.previous, batch)

    def step(self, batch: Batch) -> dict[str, Any]:
        theta, delta = self.theta, self.theta - self.previous
        length = float(np.linalg.norm(delta))
        self.longest = max(self.longest, length)

        # Observe.
        losses = self.problem.losses(theta, batch)
        gradients = self.problem.gradients(theta, batch)
        changes = self.changes(batch, delta)
        y, r = losses.mean(), losses.var(ddof=1) / len(losses)
        g, sigma = self.grouped(gradients)
        change, Q = self.grouped(changes)
        sigma, Q = self.shaped(sigma), self.shaped(Q)
        measured = self.count % self.noise_every == 0 or self.count < self.noise_every
        if self.noise_every > 1:  # remembered: Σ as it was, Q as an average
            self.held_noise = sigma = sigma if measured else self.held_noise
            if measured and length > 0:
                self.held_changes.append(Q / length**2)
            Q = recalled(self.held_changes) * length**2
        self.value_noises.append(r)
        self.gradient_noises.append(sigma)
        r = corrected_average(self.value_noises, self.value_decay)
        sigma = corrected_average(self.gradient_noises, self.noise_decay)

        # Function value, App. B.
        slope_noise = float(np.sum(self.P * delta**2)) if length > 0 else 0.0
        predicted = self.u + self.m @ delta + change @ delta / 2
        spread = slope_noise + float(np.sum(Q * delta**2)) / 4
        model_error = max((y - predicted) ** 2 - (self.s + spread + r), 0.0)
        _, self.u, self.s = kalman(predicted, self.s + spread + model_error, y, r)

        # Did the last step end steeper uphill than it began downhill, or at least on
        # no parabola? By three deviations, were all of the noise along it.
        size = len(theta)
        fall, climb = -self.m @ delta, g @ delta
        noise = (np.mean(self.P) + np.mean(sigma)) * size if length > 0 else 0.0
        overshot = fall > 0 and climb - fall > 3 * np.sqrt(noise) * length
        off_by = abs(climb + fall - change @ delta)
        strayed = off_by > 3 * np.sqrt(noise + np.mean(Q) * size) * length

        # Gradient, Eq. 6-8; nothing is known of it after such a step.
        unknown = np.where(overshot or strayed, np.inf, self.P + Q)
        gain, self.m, self.P = kalman(self.m + change, unknown, g, sigma)

        # Direction, §2.3.
        d = -self.m
        if self.direction == "adam_style":
            d = d / (np.sqrt(self.m**2 + self.P) + self.epsilon)
        norm_d = float(np.linalg.norm(d))

        # Probe.
        filtered = -float(d @ self.m), float(np.sum(self.P * d**2))
        if self.probe == "current":
            bends = np.einsum("i,nij,j->n", d, self.problem.hessians(theta, batch), d)
            bend, bend_noise = bends.mean(), bends.var(ddof=1) / len(bends)
            if not measured:  # as it was, per unit of length
                bend, bend_noise = np.array(self.bend) * (norm_d**2, norm_d**4)
            seen = True
            probed = (filtered[0], bend, self.s, filtered[1], bend_noise)
        else:
            last, seen = self.direction_norm, length > 0 and self.direction_norm > 0
            unit = delta / length if length > 0 else delta
            slope, _ = self.grouped((changes - gradients) @ unit)
            bend, bend_noise = self.grouped(changes @ unit / (length or 1.0))
            if self.noise_every > 1:
                if measured and length > 0:
                    self.held_bends.append(bend_noise)
                bend_noise = recalled(self.held_bends)
            probed = (slope * last, bend * last**2, self.s)
            probed = (*probed, slope_noise / (length or 1.0) ** 2 * last**2)
            probed = (*probed, bend_noise * last**4)
        probed_norm = norm_d if self.probe == "current" else self.direction_norm
        if overshot:  # the last step as it should have been, for the new direction
            seen, last = True, self.direction_norm
            secant = (fall + climb) / length**2
            probed = (fall / length / last * norm_d**2, secant * norm_d**2, self.s)
            probed = (*probed, filtered[1], noise / length**2 * norm_d**4)
            probed_norm = norm_d
            self.models.clear()
        self.overshoots += overshot
        if probed_norm > 0:
            self.bend = probed[1] / probed_norm**2, probed[4] / probed_norm**4
        sixth = 0.0
        if self.third_order is not None:
            inferred = model_error / length**6 if length > 0 else 0.0
            sixth = max(inferred, self.third_order) * norm_d**6
        probed = (*probed, sixth, abs(probed[1]), probed_norm**2)
        self.models.append(probed if seen else None)
        blank = all(entry is None for entry in self.models)

        # Average over time; where nothing was seen, the filter and what was known.
        average = np.zeros(8)
        if not blank:
            average = np.asarray(corrected_average(self.models, self.model_decay))
        model, size = Model(*average[:6]), average[6]
        if not seen:
            longer = norm_d**2 / average[7] if average[7] > 0 else 0.0
            model = model._replace(
                slope=filtered[0],
                curvature=model.curvature * longer,
                value_variance=self.s,
                slope_variance=filtered[1],
                curvature_variance=model.curvature_variance * longer**2,
            )
            size *= longer
        flat = model.curvature == 0 and model.value_variance == 0
        if blank or flat:
            bend = model.slope * norm_d / self.measuring_length
            model = model._replace(curvature=bend)
        elif self.longest > 0 and model[5] == 0 and model.curvature < size / 10:
            bend = model.slope * norm_d / (10 * self.longest)
            if abs(model.curvature) < bend:
                model = model._replace(curvature=bend)

        # Step.
        step_size = self.rule(model, self.count)
        self.previous, self.theta = theta, theta + step_size * d
        self.direction_norm = norm_d
        self.count += 1
        return {
            "params": self.theta,
            "mean": self.m,
            "variance": self.P,
            "value": self.u,
            "value_variance": self.s,
            "model_error": model_error,
            "step_size": step_size,
            "gain": np.mean(gain),
            "overshot": float(self.overshoots),
            "slope": probed[0],
            "curvature": probed[1],
            "model": np.array(model),
            "displacement_norm": length,
        }
