"""The configuration of a run: one group of settings for each of the four layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import inf

import torch

from ..policy import OBJECTIVES, SCHEDULES, Schedule, schedule_from_dict, schedule_to_dict
from ..rewards import Answers, shaped
from ..system import CORRECTIONS, LengthSurgeDecay

ACTIVATIONS = ("float32", "bfloat16", "float16", "float8_e4m3", "float8_e4m3_blocks")
PRECISIONS = (*ACTIVATIONS, "int4")

# The layers do not know each other, so the loop lists the schedule that layer 4 brings.
SCHEDULES["LengthSurgeDecay"] = LengthSurgeDecay


def _require(ok: bool, text: str) -> None:
    if not ok:
        raise ValueError(text)


@dataclass(frozen=True)
class DataConfig:
    """Layer 1. What is asked, how answers are judged, how many are drawn.

    A step draws `prompts` problems of `task` (with `task_options`, or else those of its warm
    start) and `group_size` completions of each, at most
    `max_new_tokens` long; `verifier` pays for them. Every `eval_every` steps `eval_prompts`
    held-out problems are answered once each and judged by the strict verifier.

    With `dynamic_sampling` (DAPO) a step trains on `prompts` groups whose rewards differ: others
    are dropped, and as many prompts are drawn again, at most `max_refills` times. What was drawn
    is logged (`drawn_groups`), and the signals of layer 1 are about all of it.

    `shaping` adds components to what the verifier pays, `{"overlong": {"weight": 0.5, "buffer":
    8}}`; names and options are those of `rewards.COMPONENTS`, and the parts are logged one by one
    as `reward_part:NAME`, what the verifier pays as `reward_part:answer`. With `mask_truncated`
    cut completions leave the loss and stay in their group's mean (DAPO's overlong filter).
    """

    task: str = "sort"
    task_options: dict = field(default_factory=dict)
    verifier: str = "strict"
    prompts: int = 64
    group_size: int = 8
    max_new_tokens: int = 24
    eval_every: int = 10
    eval_prompts: int = 256
    dynamic_sampling: bool = False
    max_refills: int = 3
    shaping: dict[str, dict] = field(default_factory=dict)
    mask_truncated: bool = False

    def __post_init__(self):
        for name in ("prompts", "group_size", "max_new_tokens", "eval_every", "eval_prompts"):
            value = getattr(self, name)
            _require(value >= 1, f"data.{name}={value}: must be ≥ 1")
        _require(self.max_refills >= 0, f"data.max_refills={self.max_refills}: must be ≥ 0")
        nothing = Answers([""], [False], torch.ones(1), self.max_new_tokens, torch.zeros(1))
        shaped(nothing, self.shaping)  # a wrong name or option is an error now


@dataclass(frozen=True)
class PolicyConfig:
    """Layer 2. How far one rollout may move the policy.

    `objective`, its clips, its `aggregation` and `options` as in `policy_objective`; for `bapo`
    the options are those of `balance_bounds`, which looks at a whole update's rows. `scale` and
    `baseline` as in `group_advantages`. None is what the objective's source has. A `constant`
    denominator is rows × `data.max_new_tokens`.

    `kl_coef` times `kl_estimator` of the reference KL joins the loss, or with `kl_in` `reward` is
    taken from it before groups are compared. The reference becomes the current policy every
    `reference_every` steps (0 = never). `entropy_coef` times the exact entropy is a bonus.
    `covariance` `clip_cov` or `kl_cov` tames the share `covariance_share` of an update's tokens
    that pull entropy down most.
    A rollout is used for `epochs` passes of `minibatches` updates each.

    Tokens are sampled at `temperature`, truncated by `top_k` (0 = off), `top_p` and `min_p`; of
    the characters only those in `allowed` and the end token may be drawn ("" = all).
    """

    objective: str = "grpo"
    options: dict = field(default_factory=dict)
    scale: str | None = None
    baseline: str = "mean"
    clip_low: float | None = None
    clip_high: float | None = None
    aggregation: str | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_in: str = "loss"
    reference_every: int = 0
    entropy_coef: float = 0.0
    covariance: str | None = None
    covariance_share: float = 2e-4
    epochs: int = 1
    minibatches: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    allowed: str = ""

    def __post_init__(self):
        for name in ("epochs", "minibatches"):
            value = getattr(self, name)
            _require(value >= 1, f"policy.{name}={value}: must be ≥ 1")
        for name, known in (
            ("objective", tuple(OBJECTIVES)),
            ("scale", (None, "std", "none", "batch")),
            ("baseline", ("mean", "leave_one_out", "quantile")),
            ("aggregation", (None, "token", "sequence", "constant")),
            ("kl_estimator", ("k1", "k2", "k3", "unbiased")),
            ("kl_in", ("loss", "reward")),
            ("covariance", (None, "clip_cov", "kl_cov")),
        ):
            value = getattr(self, name)
            _require(value in known, f"policy.{name}={value!r}: one of {known}")
        for name in ("clip_low", "clip_high", "top_k", "kl_coef", "reference_every"):
            value = getattr(self, name)
            _require(value is None or value >= 0, f"policy.{name}={value}: must be ≥ 0")
        heat, mass, least = self.temperature, self.top_p, self.min_p
        _require(0 < heat < inf, f"policy.temperature={heat}: must be > 0 and finite")
        _require(0 < mass <= 1, f"policy.top_p={mass}: must lie in (0, 1]")
        _require(0 <= least <= 1, f"policy.min_p={least}: must lie in [0, 1]")

    @property
    def truncates(self) -> bool:
        """Whether some token of the vocabulary may be impossible to draw."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or bool(self.allowed)


@dataclass(frozen=True)
class NumericsConfig:
    """Layer 3. The optimizer, its learning rate, clipping and faults.

    `optimizer` is `adamw`; `muon` for hidden matrices, with the update scaled to the size of
    AdamW's, and AdamW for the rest; `muon_clip`, the same with QK-Clip; or `update_norm_cap`, what
    seed 002 calls MuonClip: no scale, and each update cut to norm 1. `qk_clip` bounds the attention
    logits after each update, with any optimizer (None: 100 with `muon_clip`, else no bound).

    The learning rate rises linearly over `warmup` updates and then stays, or with `schedule`
    `linear` falls to a tenth over the run.

    `nonfinite`: an update with a non-finite loss or gradient is counted and, with `skip`, not
    applied, with `raise`, an error, with `apply`, applied as it is. Rows of like length are
    differentiated together, at most `micro_batch` at a time (0 = any), which changes memory but
    not the gradient.
    """

    learning_rate: float = 5e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup: int = 10
    schedule: str = "constant"
    max_grad_norm: float = 1.0
    nonfinite: str = "skip"
    micro_batch: int = 0
    optimizer: str = "adamw"
    qk_clip: float | None = None

    def __post_init__(self):
        rate, norm = self.learning_rate, self.max_grad_norm
        _require(0 <= rate < inf, f"numerics.learning_rate={rate}: must be ≥ 0 and finite")
        known = ("adamw", "muon", "muon_clip", "update_norm_cap")
        _require(self.optimizer in known, f"numerics.optimizer={self.optimizer!r}: one of {known}")
        tau = self.qk_clip
        _require(tau is None or 0 < tau < inf, f"numerics.qk_clip={tau}: must be > 0 and finite")
        for name in ("warmup", "micro_batch"):
            value = getattr(self, name)
            _require(value >= 0, f"numerics.{name}={value}: must be ≥ 0")
        _require(norm > 0, f"numerics.max_grad_norm={norm}: must be > 0 (inf turns it off)")
        known = ("constant", "linear")
        _require(self.schedule in known, f"numerics.schedule={self.schedule!r}: one of {known}")
        known = ("skip", "raise", "apply")
        _require(self.nonfinite in known, f"numerics.nonfinite={self.nonfinite!r}: one of {known}")


@dataclass(frozen=True)
class SystemConfig:
    """Layer 4. What the sampler is, next to the trainer.

    The sampler holds the trainer's weights rounded to `sampler_precision` (a real cast of the
    weights and back; computation stays in float32), refreshed every `sync_every` steps except
    for tensors whose name contains one of `sync_skip`. While it samples for training,
    `sampler_activations` rounds what its layers multiply and `sampler_cache` its keys and values.
    `old_logp` says whose log-probabilities are the denominator of the policy ratio: the
    `trainer`'s, recomputed, or the `sampler`'s.
    `correction` names a row of `CORRECTIONS`, or is `minimum_prefix` or `geometric_rejection`
    (band 1/cap to cap, `correction_cap` or 1.001); its weights π_old/μ multiply the advantages,
    π_old being computed again at the start of the step (`old_logp` `trainer`).
    `off_policy_threshold` is the δ of `off_policy_sequence_mask`, against μ. `replay_routing`
    makes the trainer choose the experts that the sampler chose (`R3`) or that it chose itself at
    the start of the step (`R2`).
    `sampling_mask` says over which tokens the trainer normalises where truncation left the
    sampler fewer than all: the set that was `stored` with each token (Keep Sampling Mask), all of
    them (`none`), or what the sampler's filter, `rerun` on the trainer's own logits, leaves. That
    can lose the token that was sampled: it leaves the loss, and `lost_tokens` counts it.
    With `partial_tokens` a step samples at most so many tokens of each completion and trains on
    the groups that are whole; the others go on in the next step, with its weights (0 = off).
    """

    sampler_precision: str = "float32"
    sync_every: int = 1
    sync_skip: tuple[str, ...] = ()
    sampler_activations: str = "float32"
    sampler_cache: str = "float32"
    logit_noise: float = 0.0
    old_logp: str = "trainer"
    correction: str | None = None
    correction_cap: float | None = None
    off_policy_threshold: float | None = None
    replay_routing: str | None = None
    sampling_mask: str = "stored"
    partial_tokens: int = 0
    device: str = "cpu"

    def __post_init__(self):
        value = self.partial_tokens
        _require(value >= 0, f"system.partial_tokens={value}: must be ≥ 0")
        known = PRECISIONS
        value = self.sampler_precision
        _require(value in known, f"system.sampler_precision={value!r}: one of {known}")
        known = ACTIVATIONS
        for name in ("sampler_activations", "sampler_cache"):
            value = getattr(self, name)
            _require(value in known, f"system.{name}={value!r}: one of {known}")
        _require(self.sync_every >= 1, f"system.sync_every={self.sync_every}: must be ≥ 1")
        value = self.logit_noise
        _require(0 <= value < inf, f"system.logit_noise={value}: must be ≥ 0 and finite")
        _require(
            not (value and self.partial_tokens),
            "system.partial_tokens is set: system.logit_noise must be 0",
        )
        known = ("trainer", "sampler")
        _require(self.old_logp in known, f"system.old_logp={self.old_logp!r}: one of {known}")
        known = (None, *CORRECTIONS, "minimum_prefix", "geometric_rejection")
        _require(self.correction in known, f"system.correction={self.correction!r}: one of {known}")
        _require(
            self.correction is None or self.old_logp == "trainer",
            f"system.correction={self.correction!r} with old_logp='sampler' would count the "
            "mismatch twice: use old_logp='trainer'",
        )
        value = self.correction_cap
        _require(value is None or value > 0, f"system.correction_cap={value}: must be > 0")
        _require(
            value is None or value >= 1 or self.correction != "geometric_rejection",
            f"system.correction_cap={value}: the band of geometric_rejection is from 1/cap to cap, "
            "so it must be ≥ 1",
        )
        known = (None, "R2", "R3")
        value = self.replay_routing
        _require(value in known, f"system.replay_routing={value!r}: one of {known}")
        known = ("stored", "rerun", "none")
        value = self.sampling_mask
        _require(value in known, f"system.sampling_mask={value!r}: one of {known}")

    @property
    def separate_sampler(self) -> bool:
        """Whether the sampler's weights can differ from the trainer's at all."""
        return self.sampler_precision != "float32" or self.sync_every > 1 or bool(self.sync_skip)


GROUPS = {
    "data": DataConfig,
    "policy": PolicyConfig,
    "numerics": NumericsConfig,
    "system": SystemConfig,
}

# Settings that may change between steps. Those a schedule sets are logged under their own name.
SCHEDULED = (
    *("data.prompts", "data.group_size", "policy.clip_low", "policy.clip_high"),
    *("policy.kl_coef", "policy.entropy_coef", "policy.temperature", "numerics.learning_rate"),
)


@dataclass(frozen=True)
class TrainerConfig:
    """A whole run. `base` names the shipped starting point of the task (`mixtral-cpu`), or a
    preset or checkpoint folder to start from as it is. `out` is a folder for the run log and
    checkpoints, or None to keep nothing. Probes (KL, gap, expert load) look at `probe_rows`
    sequences every `probe_every` steps. `schedules` replaces settings as training goes on:
    `{"policy.kl_coef": Linear(0.1, 0.0, 100)}`; the value in force is logged."""

    base: str = "mixtral-cpu"
    steps: int = 200
    seed: int = 0
    out: str | None = None
    checkpoint_every: int = 20
    probe_every: int = 5
    probe_rows: int = 64
    data: DataConfig = field(default_factory=DataConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    numerics: NumericsConfig = NumericsConfig()
    system: SystemConfig = SystemConfig()
    schedules: dict[str, Schedule] = field(default_factory=dict)

    def __post_init__(self):
        for name in self.schedules:
            known = ", ".join(SCHEDULED)
            _require(name in SCHEDULED, f"schedules has {name!r}: one of {known}")
        for name in ("steps", "checkpoint_every", "probe_every", "probe_rows"):
            value = getattr(self, name)
            _require(value >= 1, f"{name}={value}: must be ≥ 1")
        parts, prompts = self.policy.minibatches, self.data.prompts
        _require(
            prompts % parts == 0,
            f"policy.minibatches={parts} does not divide data.prompts={prompts}",
        )
        if self.system.partial_tokens:
            self._check_partial()
        if self.system.sampling_mask == "rerun":
            self._check_rerun()

    def _check_partial(self) -> None:
        part, limit = self.system.partial_tokens, self.data.max_new_tokens
        _require(
            limit % part == 0,
            f"system.partial_tokens={part} does not divide data.max_new_tokens={limit}",
        )
        _require(
            not self.policy.truncates,
            "system.partial_tokens is set: policy.top_p must be 1, policy.top_k 0, policy.min_p 0 "
            "and policy.allowed empty",
        )
        _require(
            self.system.replay_routing != "R3",
            "system.partial_tokens is set: an interrupted completion keeps no routing record, so "
            "system.replay_routing='R3' cannot be used",
        )
        _require(
            not self.data.dynamic_sampling,
            "system.partial_tokens is set: data.dynamic_sampling must be False, since a step "
            "cannot tell how many of the groups in flight will have a signal",
        )
        _require(
            not {"data.group_size", "policy.temperature"} & set(self.schedules),
            "system.partial_tokens is set: groups in flight keep their size and temperature, so "
            "schedules may have neither data.group_size nor policy.temperature",
        )

    def _check_rerun(self) -> None:
        policy = self.policy
        _require(
            policy.kl_coef == 0 and "policy.kl_coef" not in self.schedules,
            "system.sampling_mask='rerun' gives policy and reference different supports, between "
            "which KL is infinite: policy.kl_coef must be 0 and not scheduled",
        )
        _require(
            policy.objective != "bapo" and policy.covariance is None,
            "system.sampling_mask='rerun' loses tokens that BAPO's search and the covariance rules "
            "would rank: use another policy.objective and policy.covariance=None",
        )

    def at(self, values: Mapping[str, float]) -> TrainerConfig:
        """These settings with some replaced: `{"policy.kl_coef": 0.1}`."""
        config = self
        for path, value in values.items():
            group, name = path.split(".")
            kind = type(getattr(getattr(config, group), name))
            value = round(value) if kind is int else value
            config = replace(config, **{group: replace(getattr(config, group), **{name: value})})
        return config

    def to_json(self) -> str:
        """The configuration as JSON text; `TrainerConfig.from_json` is its inverse."""
        schedules = {path: schedule_to_dict(s) for path, s in self.schedules.items()}
        return json.dumps(asdict(self) | {"schedules": schedules}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> TrainerConfig:
        """The configuration of a run log's header. Raises `ValueError` for any other text."""
        try:
            values = json.loads(text)
            for name, group in GROUPS.items():
                told = _renamed(values[name])
                values[name] = group(
                    **{k: tuple(v) if isinstance(v, list) else v for k, v in told.items()}
                )
            schedules = values.get("schedules", {}).items()
            values["schedules"] = {path: schedule_from_dict(s) for path, s in schedules}
            return cls(**values)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"text is no configuration of this version ({error!r})") from error


def _renamed(told: dict) -> dict:
    """A group as an older log tells it: the sampling mask was kept or not."""
    if "keep_sampling_mask" not in told:
        return told
    kept = told.pop("keep_sampling_mask")
    return told | {"sampling_mask": "stored" if kept else "none"}
