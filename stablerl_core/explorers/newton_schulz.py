"""Explorer of chapter 32: what the Newton-Schulz iteration makes of singular values."""

from __future__ import annotations

import torch
from torch import Tensor

from ..numerics import newton_schulz
from .explorer import Explorer, Slider
from .panels import Curves

# Newton and Schulz's own cubic climbs to exactly 1, slowly: a small value grows by 1.5 a step.
COEFFICIENTS = {
    "quintic": lambda steps: "quintic",
    "polar express": lambda steps: "polar_express",
    "textbook cubic": lambda steps: [(1.5, -0.5, 0.0)] * steps,
}
SIZE = 8
X = [10 ** (-4 + i / 20) for i in range(81)]


def after(values: Tensor, steps: int, coefficients: str) -> Tensor:
    """p(s) for each singular value s (n,) in [0, 1] of a matrix with ‖M‖_F = 1."""
    rest = (1 - values**2).clamp(min=0).sqrt()
    matrices = torch.diag_embed(torch.stack([values, rest], dim=-1))
    found = newton_schulz(matrices, steps=steps, coefficients=COEFFICIENTS[coefficients](steps))
    return found[:, 0, 0]


def spectrum(smallest: float) -> Tensor:
    """Eight singular values, evenly spaced on a logarithmic scale from 1 down to `smallest`."""
    shares = torch.linspace(0, 1, SIZE, dtype=torch.float64)
    return torch.tensor(smallest, dtype=torch.float64) ** shares


def orthogonalize(steps: int, coefficients: str, smallest: float):
    """The polynomial of the iteration, and a matrix of eight singular values before and after."""
    before = spectrum(smallest)
    share = before / before.norm()
    made = after(share, steps, coefficients)
    curve = after(torch.tensor(X, dtype=torch.float64), steps, coefficients)
    wide = [y for x, y in zip(X, curve.tolist(), strict=True) if x >= 0.0099]
    text = (
        f"Shares of .01 to 1 land in [{min(wide):.2f}, {max(wide):.2f}]. This matrix: its smallest "
        f"singular value was {smallest:g} of the largest and is {made[-1] / made[0]:.2g} of it; "
        f"the update has norm {made.norm():.2f}, an exactly orthogonal one {SIZE**0.5:.2f}."
    )
    return text, [
        Curves(
            "What becomes of a singular value",
            "before, as a share of the matrix's norm",
            "after",
            X,
            {"the iteration": curve.tolist()},
            points={
                "smallest": (share[-1].item(), made[-1].item()),
                "largest": (share[0].item(), made[0].item()),
            },
            y_range=(0, 1.4),
            log_x=True,
        ),
        Curves(
            "The eight of this matrix",
            "singular value, by its rank",
            "size",
            list(range(1, SIZE + 1)),
            {"before (largest = 1)": before.tolist(), "after": made.tolist()},
            y_range=(0, 1.4),
        ),
    ]


NEWTON_SCHULZ = Explorer(
    "newton_schulz",
    "How flat does the iteration make a spectrum?",
    orthogonalize,
    [
        Slider("steps", "steps", [1, 2, 3, 4, 5, 6, 8, 10], 5),
        Slider("coefficients", "coefficients", list(COEFFICIENTS), "quintic"),
        Slider(
            "smallest",
            "smallest singular value, of the largest",
            [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 0.9],
            1e-2,
            log=True,
        ),
    ],
    alt="Left, the singular value after the iteration against the one before: with five quintic "
    "steps a line that climbs steeply and from one hundredth on waves between 0.7 and 1.1. Right, "
    "eight singular values that fall from 1 to 0.01 before, and lie near 1 after.",
)
ALL = (NEWTON_SCHULZ,)
