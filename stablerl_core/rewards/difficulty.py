"""How hard a problem is for the policy of now, and how well a few tries can tell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Z95 = 1.959964


@dataclass(frozen=True)
class PassRate:
    """Share of right answers in some tries, with the ends of its interval."""

    rate: float
    low: float
    high: float


def wilson(right: float, tries: float, z: float = Z95) -> PassRate:
    """Pass rate with Wilson's interval, which stays inside [0, 1] also for 0 of 8.

        (p̂ + z²/2n ± z √(p̂(1 − p̂)/n + z²/4n²)) / (1 + z²/n)

    The completions were drawn from μ at one version of the weights. `right` and `tries` may be
    fractions (older tries that count less). Raises `ValueError`: no tries, right outside of them.
    """
    _check(right, tries)
    share = right / tries
    middle = share + z * z / (2 * tries)
    half = z * math.sqrt(share * (1 - share) / tries + (z / (2 * tries)) ** 2)
    norm = 1 + z * z / tries
    return PassRate(share, max(0.0, (middle - half) / norm), min(1.0, (middle + half) / norm))


def bucket_chance(right: int, tries: int, low: float = 0.3, high: float = 0.7) -> float:
    """How likely a problem with this count has a pass rate between `low` and `high`.

        P(low ≤ p ≤ high),  p ~ Beta(1 + right, 1 + tries − right)

    The posterior of a uniform prior, exact for whole counts: the Beta distribution's tail is
    a binomial sum. Raises `ValueError`: counts that are not whole or out of range, low ≥ high.
    """
    _check(right, tries)
    if int(right) != right or int(tries) != tries:
        raise ValueError(f"right={right}, tries={tries}: must be whole numbers")
    if not 0 <= low < high <= 1:
        raise ValueError(f"low={low}, high={high}: must be 0 ≤ low < high ≤ 1")

    def below(p: float) -> float:
        n = int(tries) + 1
        return math.fsum(
            math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(int(right) + 1, n + 1)
        )

    return below(high) - below(low)


def buckets(
    rates: Mapping[str, float], low: float = 0.3, high: float = 0.7
) -> dict[str, list[str]]:
    """Problems by pass rate: `hard` below `low`, `easy` above `high`, and the `middle`.

    Seed 001 gives 30 to 70 %; Bae et al. (arXiv 2504.03380) keep 20 to 80 %.
    """
    found: dict[str, list[str]] = {"hard": [], "middle": [], "easy": []}
    for name, rate in rates.items():
        found["hard" if rate < low else "easy" if rate > high else "middle"].append(name)
    return found


def second_stage(right_of_8: Sequence[int], right_of_512: Sequence[int]) -> list[int]:
    """Problems of GLM-4.5's second stage: none of 8 tries right, but one of 512.

    Hard for the policy and known to be possible (arXiv 2508.06471, §3.1). Everything else that
    is not solved belongs to the first. Raises `ValueError` when the lengths differ.
    """
    if len(right_of_8) != len(right_of_512):
        raise ValueError(f"{len(right_of_8)} counts of 8 and {len(right_of_512)} of 512")
    both = enumerate(zip(right_of_8, right_of_512, strict=True))
    return [i for i, (few, many) in both if few == 0 and many > 0]


@dataclass(frozen=True)
class AdvantageMoments:
    """What a group of G tells about one completion, in exact expectation over groups.

    signal: E[Â (R − p)] / √(p(1 − p)), how far the advantage follows the reward that was due.
    second: E[Â²]. error: E[(Â − A)²], A being the advantage that an infinite group would give.
    """

    signal: float
    second: float
    error: float


def advantage_moments(pass_rate: float, group_size: int, scale: str = "std") -> AdvantageMoments:
    """Moments of the group advantage for rewards 0 or 1, summed over all counts of right answers.

        Â = (R − k/G) / s,   s = √(k/G (1 − k/G)) (`std`, no eps) or 1 (`none`);
        A = (R − p) / √(p (1 − p)) (`std`) or R − p (`none`);   k ~ Binomial(G, p)

    Â is 0 where all rewards are equal. The G completions are independent, drawn from μ.
    Raises `ValueError`: p not inside (0, 1), G below 1, an unknown scale.
    """
    p, n = pass_rate, group_size
    if not 0 < p < 1 or n < 1:
        raise ValueError(f"pass_rate={p}, group_size={n}: must lie inside (0, 1) and be ≥ 1")
    if scale not in ("std", "none"):
        raise ValueError(f"scale={scale!r}: expected 'std' or 'none'")
    deviation = math.sqrt(p * (1 - p))
    unit = deviation if scale == "std" else 1.0
    sums = [0.0, 0.0, 0.0]
    for k in range(n + 1):
        weight, share = math.comb(n, k) * p**k * (1 - p) ** (n - k), k / n
        spread = math.sqrt(share * (1 - share)) if scale == "std" else 1.0
        for reward, part in ((1, share), (0, 1 - share)):
            found = 0.0 if k in (0, n) else (reward - share) / spread
            terms = (found * (reward - p), found**2, (found - (reward - p) / unit) ** 2)
            sums = [s + weight * part * t for s, t in zip(sums, terms, strict=True)]
    return AdvantageMoments(sums[0] / deviation, sums[1], sums[2])


def _check(right: float, tries: float) -> None:
    if not tries > 0 or not 0 <= right <= tries:
        raise ValueError(f"right={right}, tries={tries}: expected tries > 0 and 0 ≤ right ≤ tries")
