"""Each rule on the fault it is for, on its false alarms, and the order of causes."""

import inspect
import json
import math

import numpy as np
import pytest

from stablerl_core.diagnosis import Series, SignalLog, diagnose, layer1, layer2, layer3, layer4
from stablerl_core.diagnosis.diagnose import RULES
from stablerl_core.runlog import RunLog

N = 60
RNG = np.random.default_rng(0)


def series(values, steps=None) -> Series:
    values = np.asarray(values, float)
    return Series(np.arange(1.0, len(values) + 1) if steps is None else np.asarray(steps), values)


def wobble(level, size, n=N, seed=1):
    return level + np.random.default_rng(seed).normal(0, size, n)


def healthy(**changes) -> SignalLog:
    """A run that learns: what is not said in `changes` looks as it should. None takes it out."""
    signals = {
        "reward": np.linspace(0.3, 0.7, N) + wobble(0, 0.02),
        "heldout_accuracy": np.linspace(0.3, 0.65, N) + wobble(0, 0.02, seed=2),
        "length": wobble(300, 5),
        "zero_variance_groups": wobble(0.3, 0.03),
        "kl_ref": np.linspace(0.0005, 0.02, N),
        "entropy": np.linspace(0.5, 0.3, N) + wobble(0, 0.01),
        "grad_norm": np.abs(wobble(0.4, 0.05)),
        "loss": wobble(0, 0.01),
        "logp_gap": np.abs(wobble(0.012, 0.001)),
    } | changes
    given = {k: v for k, v in signals.items() if v is not None}
    ready = {k: v if isinstance(v, Series) else series(v) for k, v in given.items()}
    return SignalLog(ready, "test")


def step(before, after, at=30, size=0.0):
    return np.r_[np.full(at, before), np.full(N - at, after)] + wobble(0, size)


def falls(at=40, low=0.05):
    return np.r_[np.linspace(0.3, 0.7, at), np.full(N - at, low)] + wobble(0, 0.02)


COLLAPSE = {"reward": falls(), "heldout_accuracy": falls()}
HALVED = series([0.38, 0.24, 0.09, 0.15, 0.03, 0.04, 0.06], range(1, 62, 10))
STEADY = series([0.38, 0.45, 0.36, 0.42, 0.35, 0.47, 0.41], range(1, 62, 10))
NAN_FROM_30 = np.where(np.arange(N) < 30, 0.4, np.nan)
SAW = np.tile(np.linspace(0.01, 0.2, 6), 10)

FAULTS = {
    1: {
        "nothing is ever paid": dict(reward=np.zeros(N), zero_variance_groups=np.ones(N)),
        "everything is paid": dict(reward=np.ones(N), zero_variance_groups=np.ones(N)),
        "most groups are tied": dict(
            reward=wobble(0.5, 0.02), zero_variance_groups=step(0.3, 0.9, size=0.01)
        ),
        "reward up, accuracy down": dict(heldout_accuracy=np.linspace(0.6, 0.2, N)),
        "accuracy halves, reward holds": dict(reward=wobble(0.85, 0.03), heldout_accuracy=HALVED),
        "reward up, accuracy halves, then KL": dict(
            heldout_accuracy=HALVED, kl_ref=np.linspace(0, 0.9, N)
        ),
        "one part pays for another": {
            "reward": wobble(0.8, 0.03),
            "reward_part:answer": np.linspace(0.5, 0.2, N),
            "reward_part:length": np.linspace(0.3, 0.6, N),
        },
        "one part never pays": {"reward_part:format": np.zeros(N)},
        "a group of one": dict(reward_std=np.full(N, np.nan), loss=np.full(N, np.nan)),
        "prompts are cut": dict(prompt_truncated=np.full(N, 1.0)),
        "grouping is lost": dict(advantage_mean=np.linspace(0.3, 0.7, N) + wobble(0, 0.02)),
        "answers cannot end": dict(reward=np.zeros(N), truncated=np.ones(N)),
    },
    2: {
        "KL runs away": COLLAPSE | dict(kl_ref=step(0.01, 3.0, at=25)),
        "entropy runs up": COLLAPSE | dict(entropy=step(0.5, 4.0, at=25)),
        "entropy dies": dict(entropy=step(0.5, 0.005, at=25), reward=falls()),
        "steps are too large": COLLAPSE | dict(kl_step=step(0.001, 0.4, at=25)),
        "KL at step one": dict(kl_ref=wobble(40, 2)),
        "KL below zero": dict(kl_ref=wobble(-5, 0.5)),
        "half the tokens clipped": COLLAPSE | dict(clip_fraction=step(0.01, 0.5, at=25)),
        "weights of long answers": dict(weight_mean=np.full(N, 0.06)),
    },
    3: {
        "NaN": dict(loss=NAN_FROM_30, grad_norm=NAN_FROM_30),
        "counted NaN": COLLAPSE | dict(nonfinite=step(0, 1, at=25)),
        "the gradient is zero": dict(grad_norm=np.zeros(N), reward_std=wobble(0.3, 0.01)),
        "the rate is zero": dict(learning_rate=np.zeros(N)),
        "the gradient explodes": COLLAPSE
        | dict(grad_norm=np.r_[np.full(25, 0.4), np.geomspace(1, 1e5, N - 25)]),
        "the gradient is huge": dict(grad_norm=np.full(N, 2.9e9)),
        "the loss is a sum": dict(loss=step(0.1, 250, at=25)),
        "fp16 overflows": dict(loss_scale=np.r_[np.full(20, 65536.0), np.ones(N - 20)]),
    },
    4: {
        "another policy from the start": COLLAPSE | dict(logp_gap=wobble(0.14, 0.01)),
        "another model": dict(logp_gap=wobble(1.3, 0.1)),
        "low correlation": dict(logp_gap=None, prob_correlation=wobble(0.5, 0.01)),
        "the gap grows": dict(logp_gap=np.linspace(0.01, 0.1, N)),
        "KL of the mismatch grows": dict(logp_gap=None, mismatch_kl=np.linspace(0.008, 0.04, N)),
        "correlation decays": dict(logp_gap=None, prob_correlation=np.linspace(0.99, 0.6, N)),
        "the gap is a sawtooth": dict(logp_gap=SAW),
        "weights are the kept mass": dict(logp_gap=None, weight_mean=np.full(N, 0.8)),
        "no token is trained": dict(
            grad_norm=np.zeros(N), reward_std=wobble(0.3, 0.01), trained_tokens=np.zeros(N)
        ),
        "accuracy halves, reward is another policy's": dict(
            reward=wobble(0.6, 0.02), heldout_accuracy=HALVED, logp_gap=np.linspace(0.05, 0.3, N)
        ),
        "data grow old": COLLAPSE | dict(staleness=step(0.5, 6, at=25)),
    },
}
CASES = [(layer, name) for layer, cases in FAULTS.items() for name in cases]


@pytest.mark.parametrize("layer, name", CASES, ids=[f"{k} {n}" for k, n in CASES])
def test_the_fault_is_named(layer, name):
    found = diagnose(healthy(**FAULTS[layer][name]))
    assert found.layer == layer, found.to_text()
    assert found.exit_code == 1 and found.findings[0].check_first and found.findings[0].do_not


FALSE_ALARMS = {
    "nothing": {},
    "loss is zero with a gradient": dict(loss=np.zeros(N)),
    "no KL, because beta is 0": dict(kl_ref=None),
    "nothing clipped with one update": dict(clip_fraction=np.zeros(N)),
    "low entropy at the ceiling": dict(
        reward=np.r_[np.linspace(0.3, 1, 40), np.ones(N - 40)],
        heldout_accuracy=np.r_[np.linspace(0.3, 0.98, 40), np.full(N - 40, 0.98)],
        zero_variance_groups=np.r_[np.linspace(0.3, 1, 40), np.ones(N - 40)],
        entropy=np.r_[np.linspace(0.7, 0.001, 40), np.full(N - 40, 0.001)],
    ),
    "gradient norm over fewer tokens": dict(
        grad_norm=np.geomspace(0.1, 4, N), trained_tokens=np.geomspace(1e5, 2e3, N)
    ),
    "NaN in a metric alone": dict(kl_ref=np.full(N, np.nan), clip_fraction=np.full(N, np.nan)),
    "reward centred on zero": dict(reward_centred=np.zeros(N)),
    "masked weights": dict(weight_mean_capped=np.full(N, 0.02)),
    "bf16 gap": dict(logp_gap=wobble(0.018, 0.002), prob_gap_max=np.full(N, 0.6)),
    "long-context sequence weights": dict(mismatch_chi2_seq=wobble(60, 5)),
    "one skipped update": dict(
        grad_norm=np.where(np.arange(N) == 30, np.inf, 0.4), loss=wobble(0, 0.01)
    ),
    "few evaluations that wobble": dict(heldout_accuracy=STEADY),
    "one part rises, the other holds": {
        "reward_part:accuracy": wobble(0.5, 0.02),
        "reward_part:format": np.linspace(0.1, 0.9, N),
    },
    "answers get shorter": dict(length=np.linspace(400, 120, N)),
    "KL of a useful fine-tune": dict(kl_ref=np.linspace(0, 0.17, N)),
}


@pytest.mark.parametrize("name", FALSE_ALARMS)
def test_a_healthy_run_is_not_accused(name):
    found = diagnose(healthy(**FALSE_ALARMS[name]))
    assert found.verdict == "healthy", found.to_text()
    assert found.exit_code == 0 and not found.findings


def test_every_rule_of_the_four_layers_is_asked():
    modules = (layer1, layer2, layer3, layer4)
    own = {
        f
        for m in modules
        for name, f in inspect.getmembers(m, inspect.isfunction)
        if f.__module__ == m.__name__ and not name.startswith("_")
    }
    assert own == set(RULES) and len(RULES) == len(own)


def test_the_first_event_is_the_cause_and_the_rest_follows():
    found = diagnose(
        healthy(
            **COLLAPSE,
            logp_gap=np.r_[np.full(15, 0.012), np.linspace(0.05, 0.5, N - 15)],
            entropy=step(0.5, 4.0, at=30),
            grad_norm=np.r_[np.full(38, 0.4), np.full(N - 38, 900.0)],
        )
    )
    assert found.layer == 4 and found.findings[0].first_step <= 18
    assert [f.layer for f in found.consequences if not f.harm] == [2, 3]
    assert any(f.harm for f in found.consequences)


def test_what_moves_after_the_fall_is_no_cause():
    found = diagnose(
        healthy(reward=falls(20), heldout_accuracy=falls(20), entropy=step(0.5, 4.0, at=45))
    )
    assert found.verdict == "insufficient evidence"
    assert "moved after" in found.reason and found.consequences


def test_a_gap_that_follows_entropy_is_not_accused():
    found = diagnose(
        healthy(
            **COLLAPSE,
            entropy=step(0.5, 4.0, at=20),
            logp_gap=np.r_[np.full(35, 0.012), np.full(N - 35, 0.1)],
        )
    )
    assert found.layer == 2


@pytest.mark.parametrize(
    "log",
    [
        healthy(reward=falls(), heldout_accuracy=falls()),
        SignalLog({"reward": series(np.linspace(0.3, 0.7, N))}, "csv"),
        SignalLog({"entropy": series(wobble(0.5, 0.01)), "loss": series(np.zeros(N))}, "csv"),
        SignalLog({"reward": series([0.3, 0.4, 0.5]), "entropy": series([0.5, 0.5, 0.4])}, "csv"),
        healthy(reward=np.linspace(0.6, 0.45, N) + wobble(0, 0.02), heldout_accuracy=None),
    ],
    ids=["a fall without a cause", "reward alone", "no outcome", "three rows", "a slow drift"],
)
def test_it_abstains(log):
    found = diagnose(log)
    assert found.verdict == "insufficient evidence" and found.layer is None, found.to_text()
    assert found.exit_code == 3 and found.reason


def test_it_says_what_the_log_cannot_tell_and_how_to_log_it():
    signals = {k: v for k, v in healthy().signals.items() if k not in ("logp_gap", "kl_ref")}
    found = diagnose(SignalLog(signals, "verl"))
    told = {m["signal"]: m for m in found.missing_signals}
    assert set(told) == {"logp_gap", "kl_ref"}
    assert "calculate_log_probs" in told["logp_gap"]["how"] and told["logp_gap"]["layer"] == 4
    assert found.confidence != "high"
    other = diagnose(SignalLog(signals, "slime")).missing_signals
    assert any("'train/train_rollout_logprob_abs_diff'" in m["how"] for m in other)


def test_a_break_where_the_run_was_resumed_is_layer_4():
    log = healthy(grad_norm=step(0.4, 6.0, at=30, size=0.02))
    assert diagnose(log).verdict == "healthy"
    resumed = SignalLog(log.signals, "test", restarts=(31.0,))
    assert diagnose(resumed).layer == 4


def test_our_own_log_is_read_directly_and_an_empty_one_is_an_error():
    log = RunLog()
    for n in range(1, 40):
        log.append({"step": n, "reward": 0.0, "zero_variance_groups": 1.0, "entropy": 0.5})
    assert diagnose(log).layer == 1
    with pytest.raises(ValueError, match="no row"):
        diagnose(RunLog())


@pytest.mark.parametrize("layer, name", CASES[::4], ids=[f"{k} {n}" for k, n in CASES[::4]])
def test_json_is_strict_and_has_the_fields_of_the_contract(layer, name):
    told = json.loads(
        diagnose(healthy(**FAULTS[layer][name])).to_json(), parse_constant=lambda c: 1 / 0
    )
    assert told["layer"] == layer and told["verdict"] == f"layer {layer}"
    for finding in told["findings"]:
        assert {"layer", "signal", "first_step", "evidence", "check_first", "do_not"} <= set(
            finding
        )
        assert math.isfinite(finding["first_step"])
    assert isinstance(told["missing_signals"], list)
