"""Configuration: the JSON round trip, and every setting that is refused before a run starts."""

import json
import math
from dataclasses import FrozenInstanceError, fields

import pytest

from stablerl_core.system import LengthSurgeDecay
from stablerl_core.training import (
    DataConfig,
    NumericsConfig,
    PolicyConfig,
    SystemConfig,
    TrainerConfig,
)

GROUPS = {
    "data": DataConfig,
    "policy": PolicyConfig,
    "numerics": NumericsConfig,
    "system": SystemConfig,
}
CHANGED = TrainerConfig(
    base="qwen3-moe-cpu",
    steps=7,
    seed=3,
    out="runs/x",
    data=DataConfig(task="chain_sum", task_options={"min_terms": 2, "names": ["a", "b"]}),
    policy=PolicyConfig(objective="reinforce", aggregation="token", kl_coef=0.1, top_k=5),
    numerics=NumericsConfig(max_grad_norm=math.inf, betas=(0.8, 0.9), micro_batch=4),
    system=SystemConfig(sampler_precision="int4", sync_every=3, sync_skip=("lm_head", "norm")),
)


@pytest.mark.parametrize("config", [TrainerConfig(), CHANGED], ids=["default", "changed"])
def test_json_round_trip(config):
    again = TrainerConfig.from_json(config.to_json())
    assert again == config and again.to_json() == config.to_json()
    assert isinstance(again.numerics.betas, tuple) and isinstance(again.system.sync_skip, tuple)


def test_every_setting_is_in_the_json():
    told = json.loads(CHANGED.to_json())
    for name, group in GROUPS.items():
        assert set(told[name]) == {field.name for field in fields(group)}
    assert TrainerConfig.from_json(CHANGED.to_json()).numerics.max_grad_norm == math.inf


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values.pop("data"),
        lambda values: values.update(colour="red"),
        lambda values: values["policy"].update(colour="red"),
        lambda values: values.update(policy=3),
    ],
)
def test_json_of_another_version_is_refused(change):
    values = json.loads(CHANGED.to_json())
    change(values)
    with pytest.raises(ValueError, match="no configuration of this version"):
        TrainerConfig.from_json(json.dumps(values))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null"])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError):
        TrainerConfig.from_json(text)


@pytest.mark.parametrize("name", ["steps", "checkpoint_every", "probe_every", "probe_rows"])
def test_counts_of_the_run_start_at_one(name):
    with pytest.raises(ValueError, match=f"{name}=0: must be ≥ 1"):
        TrainerConfig(**{name: 0})


def test_minibatches_divide_the_prompts():
    with pytest.raises(ValueError, match="policy.minibatches=3 does not divide data.prompts=4"):
        TrainerConfig(data=DataConfig(prompts=4), policy=PolicyConfig(minibatches=3))


@pytest.mark.parametrize(
    "group, name, value",
    [
        *[
            ("data", name, 0)
            for name in ("prompts", "group_size", "max_new_tokens", "eval_every", "eval_prompts")
        ],
        ("policy", "epochs", 0),
        ("policy", "minibatches", 0),
        ("policy", "objective", "ppo"),
        ("policy", "scale", "mad"),
        ("policy", "aggregation", "mean"),
        ("policy", "kl_estimator", "k4"),
        ("policy", "kl_coef", -0.1),
        ("policy", "kl_coef", math.nan),
        ("policy", "clip_low", -0.1),
        ("policy", "clip_high", math.nan),
        ("policy", "temperature", 0.0),
        ("policy", "temperature", math.inf),
        ("policy", "top_p", 0.0),
        ("policy", "top_p", 1.1),
        ("policy", "top_k", -1),
        ("policy", "min_p", 1.1),
        ("policy", "min_p", -0.1),
        ("numerics", "learning_rate", -1e-4),
        ("numerics", "learning_rate", math.nan),
        ("numerics", "learning_rate", math.inf),
        ("numerics", "max_grad_norm", 0.0),
        ("numerics", "max_grad_norm", math.nan),
        ("numerics", "warmup", -1),
        ("numerics", "micro_batch", -1),
        ("numerics", "schedule", "cosine"),
        ("numerics", "nonfinite", "ignore"),
        ("system", "sampler_precision", "fp8"),
        ("system", "sync_every", 0),
        ("system", "old_logp", "nobody"),
    ],
)
def test_a_setting_out_of_range_is_named_with_its_group(group, name, value):
    with pytest.raises(ValueError, match=f"{group}.{name}={value!r}"):
        GROUPS[group](**{name: value})


@pytest.mark.parametrize(
    "system, separate",
    [
        (SystemConfig(), False),
        (SystemConfig(old_logp="sampler"), False),
        (SystemConfig(sampler_precision="bfloat16"), True),
        (SystemConfig(sync_every=2), True),
        (SystemConfig(sync_skip=("lm_head",)), True),
    ],
)
def test_when_the_sampler_is_another_model(system, separate):
    assert system.separate_sampler == separate


@pytest.mark.parametrize("config", [TrainerConfig(), *(group() for group in GROUPS.values())])
def test_a_configuration_does_not_change(config):
    with pytest.raises(FrozenInstanceError):
        setattr(config, fields(config)[0].name, 1)


def test_the_schedule_of_layer_4_is_kept_with_a_run():
    config = TrainerConfig(schedules={"numerics.learning_rate": LengthSurgeDecay(base=1e-4)})
    assert TrainerConfig.from_json(config.to_json()) == config
