"""Parts of a gradient add up to the whole, planted batches are what they are called, guards act."""

import pytest
import torch
from torch import nn

from stablerl_core.experiments import EXPERIMENTS, first_nan
from stablerl_core.experiments.first_nan import BASE, Run, collect, policy_loss
from stablerl_core.experiments.gradient_spikes import (
    KINDS,
    OUTLIERS,
    RATE,
    Guard,
    _filter,
    blow_up,
    counted_norms,
    counts,
    kind_of,
    problem_sums,
    train,
    weighted,
    with_signal,
)
from stablerl_core.numerics import gradient_norm
from stablerl_core.rewards import task_by_name
from stablerl_core.training import load_base


@pytest.fixture(scope="module")
def base():
    return load_base(BASE)


@pytest.fixture
def batch(base):
    return collect(*base, task_by_name("sort").sample("train", 4, seed=3), 3)[0]


def test_every_third_batch_is_not_ordinary_and_the_kinds_take_turns():
    kinds = [kind_of(n) for n in range(1, 37)]
    assert kinds.count("ordinary") == 24
    assert [kinds[i] for i in (2, 5, 8, 11)] == list(KINDS) and kinds.count("tail") == 3


def test_the_problems_add_up_to_the_gradient_of_the_batch(base, batch):
    model = base[0]
    sums, tokens = problem_sums(model, batch)
    assert tokens == batch["mask"].view(4, -1).sum(1).tolist()
    together = weighted(sums, [1 / sum(tokens)] * 4)
    whole = torch.autograd.grad(policy_loss(model, batch), list(model.parameters()))
    for ours, theirs in zip(together, whole, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    norms = counted_norms(model, batch)
    assert norms["token"] == pytest.approx(float(torch.nn.utils.get_total_norm(whole)), rel=1e-4)
    assert norms["sum"] == pytest.approx(norms["token"] * sum(tokens), rel=1e-4)
    assert norms["constant"] == pytest.approx(norms["sum"] / (24 * 32), rel=1e-4)


def test_micro_is_the_mean_of_the_problems_own_means(base, batch):
    model = base[0]
    pieces = [{k: t[8 * i : 8 * i + 8] for k, t in batch.items()} for i in range(4)]
    loss = sum(policy_loss(model, piece) for piece in pieces) / 4
    grads = torch.autograd.grad(loss, list(model.parameters()))
    expected = float(torch.nn.utils.get_total_norm(grads))
    assert counted_norms(model, batch)["micro"] == pytest.approx(expected, rel=1e-4)


def test_one_problem_is_blown_up_and_it_has_a_signal(batch):
    before = batch["advantages"].clone()
    problems = with_signal(batch)
    assert 0 < len(problems) <= 4
    blow_up(batch, which=len(problems) + 1)
    chosen = problems[1 % len(problems)]
    expected = before.clone()
    expected[8 * chosen : 8 * chosen + 8] *= -30
    assert torch.equal(batch["advantages"], expected) and not torch.equal(expected, before)
    batch["advantages"].zero_()
    blow_up(batch, which=0)
    assert not batch["advantages"].any(), "nothing to blow up"


def test_the_filter_leaves_one_problem(batch):
    kept, mask = with_signal(batch)[0], batch["mask"].clone()
    _filter(batch)
    assert torch.equal(batch["mask"].view(4, -1).any(1), torch.arange(4) == kept)
    rows = slice(8 * kept, 8 * kept + 8)
    assert torch.equal(batch["mask"][rows], mask[rows])


def parameters(norm):
    p, last = nn.Parameter(torch.full((1, 4), 10.0)), nn.Parameter(torch.ones(1))
    p.grad = torch.full((1, 4), norm / 2)
    last.grad = torch.zeros(1)
    return [p, last]


def acts(name, norms, of_problems=(1.0,) * 8):
    guard, told = Guard(name), []
    for norm in norms:
        given = parameters(norm)
        told.append(guard.act(given, of_problems) | {"left": float(gradient_norm(given))})
    return told


def test_what_each_guard_does_with_an_outlier():
    norms = [1.0, 1.0, 2.0, 1.0, 40.0, 1.0]
    fired = [0, 0, 0, 0, 1, 0]
    for name, left in (("free", norms), ("skip", norms), ("halve", norms)):
        told = acts(name, norms)
        assert [t["fired"] for t in told] == fired, "an old outlier does not fire again"
        assert [t["left"] for t in told] == pytest.approx(left)
        assert [t["grad_norm"] for t in told] == pytest.approx(norms)
        assert [1 - t["taken"] for t in told] == (fired if name == "skip" else [0] * 6)
        halved = RATE / 2 if name == "halve" else RATE
        assert told[-1]["learning_rate"] == halved and told[3]["learning_rate"] == RATE
    assert [t["left"] for t in acts("clip", norms)] == pytest.approx([1] * 6)
    cut = acts("agc", norms)  # the row has norm 20, so at most 0.2; the last layer is left out
    assert [t["left"] for t in cut] == pytest.approx([0.2] * 6) and cut[0]["fired"] == 1


def test_the_rule_by_problem_fires_once_for_each():
    (told,) = acts("halve_samples", [1.0], of_problems=[0.0] * 6 + [5.0, 5.0])
    assert told["fired"] == 2 and told["learning_rate"] == RATE / 4
    (told,) = acts("halve_samples", [1.0], of_problems=[2.0] * 8)
    assert told["fired"] == 0 and told["learning_rate"] == RATE


def test_rows_of_both_experiments(monkeypatch):
    monkeypatch.setattr(first_nan, "PROMPTS", 2)
    rows = train(0, "clip", steps=OUTLIERS[0])
    assert [r["step"] for r in rows] == list(range(1, 14)) and 0 <= rows[-1]["accuracy"] <= 1
    assert {"reward", "update_norm", "grad_norm", "fired", "taken", "learning_rate"} <= set(rows[0])
    seen = counts(0, batches=3)
    assert [r["step"] for r in seen] == [1, 2, 3] and all(r["tokens"] > 100 for r in seen)
    assert list(EXPERIMENTS["gradient_spikes"].arms)[0] == "none"


def test_a_step_is_that_of_the_whole_batch(monkeypatch):
    """The live loop sums problems; the norm it logs is that of the loss of the batch."""
    monkeypatch.setattr(first_nan, "PROMPTS", 2)
    run = Run(4)
    batch, _ = run.draw(1)
    loss = policy_loss(run.model, batch)
    grads = torch.autograd.grad(loss, list(run.model.parameters()), allow_unused=True)
    norm = float(torch.nn.utils.get_total_norm([g for g in grads if g is not None]))
    assert train(4, "free", steps=1)[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)
