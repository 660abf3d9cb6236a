"""Explorer of chapter 21: how far each KL loss is from the gradient it stands for, by drift."""

from __future__ import annotations

import torch
from torch import Tensor

from ..experiments.kl_gradient import (
    gradient_moments,
    k3_clamped,
    k3_detached_ratio,
    score_coefficient,
    seed_delta_log_delta,
)
from ..policy import kl_estimate
from .explorer import Explorer, Slider
from .panels import Bars, Curves

# Eight answers: the reference, where the policy drifts to, and where the sampler lags behind.
REFERENCE = (0.9, 0.6, 0.3, 0.0, -0.2, -0.5, -0.9, -1.3)
DRIFT = (-0.2, -0.5, 0.6, 0.1, -0.3, 0.4, -0.1, 0.0)
LAG = (0.4, -0.1, -0.5, 0.3, 0.4, -0.4, -0.3, 0.2)
X = [i / 10 for i in range(-40, 51)]
COLOURS = {"right": "#D55E00", "k1": "#888888", "k2": "#E69F00", "k3": "#0072B2"}
COLOURS |= {"clamped": "#56B4E9", "ρ·k3": "#D55E00", "sg[ρ]·k3": "#CC79A7", "δ log δ": "#009E73"}


def _unit(direction: tuple[float, ...]) -> Tensor:
    step = torch.tensor(direction, dtype=torch.float64)
    step = step - step.mean()
    return step / step.norm()


def _coefficients(logp: Tensor, ref_logp: Tensor, sampler_logp: Tensor) -> dict[str, Tensor]:
    """What each loss multiplies the score with, by its name."""
    x = logp.clone().requires_grad_()
    losses = {
        "k1": kl_estimate(x, ref_logp, "k1"),
        "k2": kl_estimate(x, ref_logp, "k2"),
        "k3": kl_estimate(x, ref_logp, "k3"),
        "clamped": k3_clamped(x, ref_logp),
        "ρ·k3": kl_estimate(x, ref_logp, "unbiased", sampler_logp),
        "sg[ρ]·k3": k3_detached_ratio(x, ref_logp, sampler_logp),
    }
    return {name: score_coefficient(loss, x) for name, loss in losses.items()}


def _curves(log_delta: Tensor) -> Curves:
    """Coefficient against log δ on policy, with the range of the eight answers marked."""
    x = -torch.tensor(X, dtype=torch.float64)
    zero = torch.zeros_like(x)
    at = x.clone().requires_grad_()
    lines = _coefficients(x, zero, x)
    lines = {"right": lines["k2"], "k1": lines["k1"], "k3": lines["k3"]} | {
        "clamped": lines["clamped"],
        "δ log δ": score_coefficient(seed_delta_log_delta(at, zero), at),
    }
    return Curves(
        "What the score is multiplied with",
        "log δ = log π_ref − log π_θ of the token",
        "coefficient",
        X,
        {name: values.tolist() for name, values in lines.items()},
        guides={"answers reach from": log_delta.min().item(), "to": log_delta.max().item()},
        colours={name: COLOURS[name] for name in lines},
        y_range=(-12, 6),
    )


def which_gradient(drift: float, lag: float):
    """Bias and noise of each loss for a policy `drift` from its reference, in its logits."""
    ref_logp = torch.tensor(REFERENCE, dtype=torch.float64).log_softmax(-1)
    logp = (ref_logp + drift * _unit(DRIFT)).log_softmax(-1)
    sampler_logp = (logp + lag * _unit(LAG)).log_softmax(-1)
    pi, mu = logp.exp(), sampler_logp.exp()
    right, _ = gradient_moments(logp - ref_logp, pi, pi)
    error, noise = {}, {}
    for name, c in _coefficients(logp, ref_logp, sampler_logp).items():
        mean, variance = gradient_moments(c, pi, mu)
        error[name] = ((mean - right).norm() / right.norm()).item()
        noise[name] = (variance.sqrt() / right.norm()).item()
    times = (noise["ρ·k3"] / noise["k3"]) ** 2
    text = (
        f"KL(π_θ ‖ π_ref) is {(pi * (logp - ref_logp)).sum():.2g} nats. The expected gradient of "
        f"k3 is off by {error['k3']:.2g} of the right one's length, that of ρ·k3 by "
        f"{error['ρ·k3']:.2g}; the variance of ρ·k3 is {times:.2g} times that of k3."
    )
    return text, [
        Bars("Error of the expected gradient", "relative", error, COLOURS, (0, 2)),
        Bars("Noise of one draw", "relative", noise, COLOURS, (0.5, 500), log_y=True),
        _curves(ref_logp - logp),
    ]


WHICH_GRADIENT = Explorer(
    "which_gradient",
    "Which gradient, at which drift",
    which_gradient,
    [
        Slider("drift", "distance of the policy from the reference, in logits",
               [0.03, 0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0], 2.0, log=True),
        Slider("lag", "distance of the sampler from the policy", [0.0, 0.5, 1.0, 2.0, 3.0], 0.0),
    ],
    alt="Bars of the error of each expected gradient: with the sampler at the policy, k2 and the "
    "unbiased loss have none, k1 is wholly wrong, and k3 grows wrong as the policy drifts. Bars of "
    "the noise, on a logarithmic axis. A drawing of each coefficient against log delta.",
)  # fmt: skip

ALL = (WHICH_GRADIENT,)
