"""One short module a chapter: its arms and its prediction; run live with one seed, or repeated."""

import os
from pathlib import Path

from . import (
    asynchrony,
    balance,
    clipping,
    contamination,
    correction_bias,
    corrections,
    evaluation_settings,
    fault_suite,
    first_nan,
    gradient_spikes,
    interruptions,
    keep_routing,
    keep_sampling_mask,
    kl_entropy,
    kl_gradient,
    long_sequences,
    muon,
    off_policy,
    opening,
    precision_memory,
    qk_clip,
    reward_hacking,
    routing_flips,
    schedules,
    shaping,
    silent_collapse,
    stages,
    two_policies,
    vanishing_gradient,
)
from .experiment import Experiment
from .figures import draw_band, small_multiples
from .measured import Measured
from .results import Interval, Results, interval, load, results_folder

CHAPTERS = (
    opening,
    reward_hacking,
    shaping,
    evaluation_settings,
    contamination,
    vanishing_gradient,
    kl_entropy,
    kl_gradient,
    clipping,
    long_sequences,
    balance,
    schedules,
    stages,
    first_nan,
    gradient_spikes,
    muon,
    qk_clip,
    precision_memory,
    off_policy,
    asynchrony,
    interruptions,
    silent_collapse,
    correction_bias,
    corrections,
    routing_flips,
    keep_routing,
    two_policies,
    keep_sampling_mask,
    fault_suite,
)
EXPERIMENTS = {e.name: e for chapter in CHAPTERS for e in chapter.ALL}

__all__ = [
    "EXPERIMENTS",
    "Experiment",
    "Interval",
    "Measured",
    "Results",
    "draw_band",
    "interval",
    "load",
    "results_folder",
    "small_multiples",
]


def run_from_command_line(name: str | None, seeds: int, out: str) -> int:
    """`stablerl experiment NAME`: repeat it over seeds, or list the experiments.

    With the environment variable `SCALE=gpu` the larger preset runs on a GPU, into `<out>/gpu`.
    """
    if name is None:
        for experiment in EXPERIMENTS.values():
            print(f"{experiment.name:16} arms: {', '.join(experiment.arms)}")
        return 0
    if name not in EXPERIMENTS:
        raise ValueError(f"experiment={name!r} is unknown; known: {', '.join(EXPERIMENTS)}")
    if seeds < 1:
        raise ValueError(f"--seeds {seeds}: must be ≥ 1")
    scale = os.environ.get("SCALE", "cpu")
    command = f"stablerl experiment {name} --seeds {seeds}"
    if scale != "cpu":
        out, command = f"{out}/{scale}", f"SCALE={scale} {command}"
    print(EXPERIMENTS[name].at_scale(scale).repeat(seeds, Path(out), command))
    return 0
