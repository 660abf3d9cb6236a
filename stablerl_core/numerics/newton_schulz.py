"""The Newton-Schulz iteration: a matrix with its singular values pushed towards one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Triple = tuple[float, float, float]

# (a, b, c) of x → a·x + b·x³ + c·x⁵, one triple a step; the last one serves all steps after it.
QUINTIC: tuple[Triple, ...] = ((3.4445, -4.7750, 2.0315),)
POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
# Rounding may leave a singular value a little above 1, where the steep polynomials run away.
_CUSHION = 1.01
COEFFICIENTS: dict[str, tuple[Triple, ...]] = {
    "quintic": QUINTIC,
    "polar_express": (
        *((a / _CUSHION, b / _CUSHION**3, c / _CUSHION**5) for a, b, c in POLAR_EXPRESS[:-1]),
        POLAR_EXPRESS[-1],
    ),
}

CACHED = 2**17  # numbers that a core iterates on at once without waiting for memory


def newton_schulz(
    matrices: Tensor,
    *,
    steps: int = 5,
    coefficients: str | Sequence[Triple] = "quintic",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Each matrix M = U S Vᵀ of `matrices` (…, m, n) becomes U p(S/‖M‖_F) Vᵀ, p(S) near 1.

    X ← M/‖M‖_F, then `steps` times A ← X Xᵀ, X ← a X + (b A + c A²) X. Five quintic steps bring
    the singular values of [.01, 1]·‖M‖_F to [.68, 1.13]; smaller ones lag behind, so the result is
    no exact U Vᵀ, and of a matrix of low rank it is not even close. Leading dimensions are a
    batch: a NaN stays in its own matrix. The scale of M has no influence, down to the smallest
    number there is; 0 stays 0. Transposing M transposes the result.

    `coefficients` is `quintic` (one polynomial, K. Jordan et al., 2024), `polar_express` (another
    one for each step, arXiv 2505.16932, with its cushion of 1.01 against rounding), or one
    (a, b, c) a step. `dtype` is what is computed in (float32 at least by default; bfloat16 is
    faster on a GPU); the result has the dtype of `matrices`.

    Raises `ValueError` for a tensor that holds no matrices, and for a wrong number of steps.
    """
    _check(matrices, steps)
    schedule = _schedule(coefficients, steps)
    if matrices.numel() == 0:
        return matrices.clone()
    tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.mT if tall else matrices
    flat = wide.reshape(-1, *wide.shape[-2:])
    work = dtype or torch.promote_types(matrices.dtype, torch.float32)
    limit = CACHED if flat.is_cpu else flat.numel()
    parts = flat.split(max(1, limit // flat[0].numel()))
    x = torch.cat([_iterate(_unit_norm(part).to(work), schedule) for part in parts])
    x = x.reshape(wide.shape).to(matrices.dtype)
    return x.mT if tall else x


def _iterate(x: Tensor, schedule: list[Triple]) -> Tensor:
    for a, b, c in schedule:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _unit_norm(matrices: Tensor) -> Tensor:
    """M/‖M‖_F in float32 or better; squares of tiny entries would vanish without the first line."""
    wide = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
    peak = wide.abs().amax((-2, -1), keepdim=True)
    x = wide / torch.where(peak == 0, 1, peak)
    return x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=1)


def _schedule(coefficients: str | Sequence[Triple], steps: int) -> list[Triple]:
    if isinstance(coefficients, str):
        if coefficients not in COEFFICIENTS:
            known = ", ".join(COEFFICIENTS)
            raise ValueError(f"coefficients={coefficients!r}: one of {known}, or (a, b, c) a step")
        table = COEFFICIENTS[coefficients]
        return [table[min(i, len(table) - 1)] for i in range(steps)]
    given = [tuple(triple) for triple in coefficients]
    if len(given) != steps or any(len(triple) != 3 for triple in given):
        raise ValueError(f"coefficients={given}: expected steps={steps} triples (a, b, c)")
    return given


def _check(matrices: Tensor, steps: int) -> None:
    if matrices.dim() < 2 or not matrices.is_floating_point():
        raise ValueError(
            f"matrices has shape {tuple(matrices.shape)} and dtype {matrices.dtype}, expected "
            "floating point (…, m, n)"
        )
    if not 1 <= steps < 100:
        raise ValueError(f"steps={steps}: must lie between 1 and 99")
