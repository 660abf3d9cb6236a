"""Weight sync: fingerprints, one planted fault of every kind, and the control at lr = 0."""

import json
import math
import random
from dataclasses import asdict, replace
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stablerl_core.system import Fingerprint, compare_fingerprints, fingerprints, lr_zero_control

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


class Policy(nn.Module):
    """Embedding tied to the head, a stack of experts, a norm, and a buffer as routers have it."""

    def __init__(self, seed=0, tie=True):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.embed = nn.Parameter(torch.randn(20, 8, generator=g))
        self.experts = nn.Parameter(torch.randn(4, 8, 8, generator=g))
        self.norm = nn.Parameter(torch.ones(8))
        self.head = self.embed if tie else nn.Parameter(self.embed.detach().clone())
        self.register_buffer("bias", torch.zeros(4))

    @torch.no_grad()
    def update(self, seed, size=0.1):
        g = torch.Generator().manual_seed(seed)
        for p in self.parameters():
            p += size * torch.randn(p.shape, generator=g)
        self.bias += size
        return self


def states(*sizes):
    """The trainer's state after each update: clones, so that ties are kept in the names only."""
    policy, out = Policy(), []
    for n, size in enumerate((0.0, *sizes)):
        policy.update(n, size)
        out.append({k: v.clone() for k, v in policy.state_dict().items()})
    return out


def prints(state, **options):
    """Fingerprints of a cloned state, with the tie that its model had."""
    found = fingerprints(state, **options)
    return found | {"head": replace(found["head"], tied="embed")}


def kinds(report):
    return {(f.kind, f.tensor, f.version) for f in report.faults}


OLD, MIDDLE, NEW = states(0.1, 0.1)
SENT, HISTORY = prints(NEW), [prints(OLD), prints(MIDDLE)]


def test_names_shapes_ties_and_stacks():
    found = fingerprints(Policy())
    stack = [f"experts[{i}]" for i in range(4)]
    assert set(found) == {"embed", *stack, "norm", "head", "bias"}
    assert found["embed"].shape == (20, 8) and found["experts[2]"].shape == (8, 8)
    assert found["head"].tied == "embed" and found["embed"].tied is None
    assert len({found[name].hash for name in stack}) == 4
    loose = fingerprints(Policy(tie=False))
    assert loose["head"].tied is None and loose["head"].hash == found["head"].hash


def test_moments():
    x = torch.tensor([[3.0, -4.0], [0.0, 0.0]])
    found = fingerprints({"x": x, "long": torch.arange(1000.0)})
    assert (found["x"].norm, found["x"].largest) == (5, 4)
    assert found["x"].samples == (3, -4, 0, 0) and found["x"].dtype == "float32"
    samples = found["long"].samples
    assert len(samples) == 64 and samples[0] == 0 and samples[-1] > 980
    assert samples == tuple(sorted(samples))


@given(st.integers(0, 10_000), st.sampled_from([torch.float32, BF16, torch.float16, FP8]))
def test_any_change_of_a_bit_and_any_exchange_changes_the_hash(seed, dtype):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(50, generator=g).to(dtype)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]

    def digest(t):
        return fingerprints({"x": t})["x"].hash

    assert digest(x) == digest(x.clone())
    place, other = torch.randperm(50, generator=g)[:2].tolist()
    changed = x.clone()
    changed.view(bits)[place] ^= 1
    assert digest(changed) != digest(x)
    swapped = x.clone().view(bits)
    swapped[[place, other]] = swapped[[other, place]]
    assert torch.equal(swapped, x.view(bits)) or digest(swapped.view(dtype)) != digest(x)


def test_the_hash_is_of_the_values_not_of_the_layout():
    x = torch.randn(6, 8)
    assert fingerprints({"x": x.t().contiguous().t()})["x"] == fingerprints({"x": x})["x"]
    assert fingerprints({"x": x[:, ::2]})["x"] == fingerprints({"x": x[:, ::2].clone()})["x"]


def test_large_tensors_are_hashed_in_parts(monkeypatch):
    from stablerl_core.system import weight_sync

    x = torch.randn(1000)
    whole = fingerprints({"x": x})["x"]
    monkeypatch.setattr(weight_sync, "_CHUNK", 77)
    parts = fingerprints({"x": x})["x"]
    assert replace(parts, norm=whole.norm) == whole
    assert parts.norm == pytest.approx(whole.norm, rel=1e-12)


def test_a_fingerprint_goes_through_json():
    one = SENT["embed"]
    back = json.loads(json.dumps(asdict(one)))
    back |= {name: tuple(back[name]) for name in ("shape", "samples")}
    assert Fingerprint(**back) == one


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (0, 2, 2), (1,)])
def test_odd_shapes_and_types(shape):
    x = torch.ones(shape)
    report = compare_fingerprints(fingerprints({"a": x}), fingerprints({"a": x.clone()}))
    assert report.agree and not report.faults
    counts = {"n": torch.tensor(3), "flag": torch.tensor([True, False])}
    assert compare_fingerprints(fingerprints(counts), fingerprints(counts)).agree
    other = {"n": torch.tensor(4), "flag": torch.tensor([True, True])}
    report = compare_fingerprints(fingerprints(counts), fingerprints(other))
    assert kinds(report) == {("different", "n", None), ("different", "flag", None)}


def test_the_same_weights_agree():
    report = compare_fingerprints(SENT, prints({k: v.clone() for k, v in NEW.items()}), HISTORY)
    assert report.agree and report.faults == () and report.tensors == 8


def test_a_tensor_that_was_never_sent():
    held = prints(NEW | {"norm": OLD["norm"]})
    report = compare_fingerprints(SENT, held, HISTORY)
    assert not report.agree and kinds(report) == {("never sent", "norm", 0)}
    held = prints(NEW | {"bias": OLD["bias"], "norm": MIDDLE["norm"]})
    report = compare_fingerprints(SENT, held, HISTORY)
    assert kinds(report) == {("never sent", "bias", 0), ("never sent", "norm", 1)}


def test_one_expert_that_was_never_sent():
    experts = NEW["experts"].clone()
    experts[2] = OLD["experts"][2]
    report = compare_fingerprints(SENT, prints(NEW | {"experts": experts}), HISTORY)
    assert kinds(report) == {("never sent", "experts[2]", 0)}


def test_a_push_that_did_not_arrive_and_a_sync_that_went_backwards():
    report = compare_fingerprints(SENT, prints(MIDDLE), HISTORY)
    assert kinds(report) == {("old version", None, 1)}
    assert "the last push did not arrive" in report.faults[0].detail
    report = compare_fingerprints(SENT, prints(OLD), HISTORY)
    assert kinds(report) == {("old version", None, 0)}
    assert "2 pushes back" in report.faults[0].detail


def test_an_old_sync_in_which_one_tensor_is_older_still():
    report = compare_fingerprints(SENT, prints(MIDDLE | {"norm": OLD["norm"]}), HISTORY)
    assert kinds(report) == {("old version", None, 1), ("never sent", "norm", 0)}


def test_what_never_changes_says_nothing_about_versions():
    """A frozen tensor is equal in all versions; it must not make an old sync look partial."""
    frozen = {"frozen": torch.arange(5.0)}
    old, middle, new = (fingerprints(s | frozen) for s in (OLD, MIDDLE, NEW))
    report = compare_fingerprints(new, old, [old, middle])
    assert kinds(report) == {("old version", None, 0)}
    report = compare_fingerprints(new, new | {"norm": old["norm"]}, [old, middle])
    assert kinds(report) == {("never sent", "norm", 0)}


def test_a_tie_that_the_sampler_does_not_know():
    """The embedding arrived; the sampler's own copy of it, the head, did not."""
    report = compare_fingerprints(SENT, fingerprints(NEW | {"head": MIDDLE["head"]}), HISTORY)
    assert kinds(report) == {("tied", "head", 1)}
    assert "tied to embed" in report.faults[0].detail


def test_a_tie_that_was_sent_under_one_name_only():
    def one(state):
        return fingerprints({k: v for k, v in state.items() if k != "head"})

    stale = fingerprints(NEW | {"head": OLD["head"]})
    report = compare_fingerprints(one(NEW), stale, [one(OLD), one(MIDDLE)])
    assert kinds(report) == {("tied", "head", 0)} and "copy of embed" in report.faults[0].detail
    assert compare_fingerprints(one(NEW), fingerprints(NEW)).agree  # a current copy
    tied = {k: v for k, v in SENT.items() if k != "head"}
    assert compare_fingerprints(SENT, tied).agree  # the sampler uses one tensor for both
    policy = Policy()
    assert compare_fingerprints(fingerprints(policy), fingerprints(policy)).agree


def test_a_tied_tensor_that_stayed_behind_with_the_other_is_no_fault_of_the_tie():
    held = prints(NEW | {k: OLD[k] for k in ("embed", "head")})
    report = compare_fingerprints(SENT, held, HISTORY)
    assert kinds(report) == {("never sent", "embed", 0), ("never sent", "head", 0)}
    sent, history = ([{"embed": x["embed"]} for x in xs] for xs in ([SENT], HISTORY))
    policy = Policy()  # its head is its embedding: one tensor, one fault
    held = {k: v for k, v in fingerprints(policy).items() if k in ("embed", "head")}
    report = compare_fingerprints(sent[0], held, history)
    assert kinds(report) == {("old version", None, 0)}


def test_the_newest_version_that_fits_is_named():
    """The norm was the same in versions 0 and 1: it missed the last push, not two."""
    history = [HISTORY[0] | {"norm": HISTORY[1]["norm"]}, HISTORY[1]]
    report = compare_fingerprints(SENT, prints(NEW | {"norm": MIDDLE["norm"]}), history)
    assert kinds(report) == {("never sent", "norm", 1)}


def test_the_same_bits_read_as_another_format_are_a_difference():
    bits = torch.tensor([1.5, -2.0]).to(BF16)
    read = fingerprints({"x": bits.view(torch.float16)})
    assert read["x"].hash == fingerprints({"x": bits})["x"].hash
    report = compare_fingerprints(fingerprints({"x": bits}), read)
    assert kinds(report) == {("different", "x", None)}


def test_names_and_shapes():
    held = fingerprints({k: v for k, v in NEW.items() if k != "bias"} | {"new": torch.ones(3)})
    held |= fingerprints({"norm": torch.ones(7)})
    report = compare_fingerprints(SENT, held, HISTORY)
    expected = {("missing", "bias", None), ("unexpected", "new", None), ("shape", "norm", None)}
    assert kinds(report) == expected and not report.agree


def test_weights_that_are_no_known_version():
    report = compare_fingerprints(SENT, prints(NEW | {"norm": NEW["norm"] + 0.3}), HISTORY)
    assert kinds(report) == {("different", "norm", None)} and "0.3" in report.faults[0].detail
    report = compare_fingerprints(SENT, prints(MIDDLE))
    assert {f.kind for f in report.faults} == {"different"}  # without a history


def test_a_cast_on_both_sides_makes_equal_mean_equal_bits():
    cast = {k: v.to(BF16) for k, v in NEW.items()}
    assert compare_fingerprints(prints(NEW, dtype=BF16), prints(cast, dtype=BF16)).faults == ()
    old = prints({k: v.to(BF16) for k, v in OLD.items()})
    history = [prints(s, dtype=BF16) for s in (OLD, MIDDLE)]
    assert kinds(compare_fingerprints(prints(NEW, dtype=BF16), old, history)) == {
        ("old version", None, 0)
    }


def rounded(state, dtype, back=True):
    def cast(x):
        if dtype is FP8:
            scale = x.abs().amax().clamp(min=1e-12) / 448
            return (x / scale).to(FP8).float() * scale
        return x.to(dtype).float() if back else x.to(dtype)

    return {k: cast(v) for k, v in state.items()}


@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP8])
def test_rounding_is_named_and_not_held_against_the_sync(dtype):
    held = prints(rounded(NEW, dtype))
    report = compare_fingerprints(SENT, held, HISTORY, rounding=dtype)
    assert report.agree and report.faults and {f.kind for f in report.faults} == {"rounding"}
    if dtype is not FP8:
        plain = compare_fingerprints(SENT, prints(rounded(NEW, dtype, back=False)), HISTORY)
        assert plain.agree and plain.faults  # the coarser of the two recorded formats
    exact = compare_fingerprints(SENT, held, HISTORY)  # both float32: this is no rounding
    assert not exact.agree and {f.kind for f in exact.faults} == {"different"}


@pytest.mark.parametrize("dtype", [BF16, FP8])
def test_rounding_does_not_hide_an_old_version(dtype):
    """Updates of 1 are far above one unit in the last place: stale weights are convicted."""
    old, new = states(1.0)
    sent, history = prints(new), [prints(old)]
    report = compare_fingerprints(sent, prints(rounded(old, dtype)), history, rounding=dtype)
    assert kinds(report) == {("old version", None, 0)} and not report.agree
    mixed = rounded(new, dtype) | {"norm": rounded(old, dtype)["norm"]}
    report = compare_fingerprints(sent, prints(mixed), history, rounding=dtype)
    assert not report.agree
    assert {f for f in kinds(report) if f[0] != "rounding"} == {("never sent", "norm", 0)}


def test_one_old_tensor_among_unknown_ones_does_not_make_the_whole_sync_old():
    held = {k: v + 0.3 for k, v in NEW.items()} | {"norm": MIDDLE["norm"]}
    report = compare_fingerprints(SENT, prints(held), HISTORY)
    assert {f for f in kinds(report) if f[0] != "different"} == {("never sent", "norm", 1)}
    assert len(report.faults) == 8


@pytest.mark.parametrize("family", ["mixtral", "deepseek-v3"])
def test_a_real_mixture_of_experts(family):
    """A sampler of bfloat16 weights; then one that never gets its norms, or the last push."""
    from stablerl_core.training import small_moe
    from stablerl_core.training.precision import round_weights

    model, sampler = (small_moe(f"{family}-cpu", seed=0)[0] for _ in range(2))
    history = [fingerprints(model)]
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(0.05 * torch.randn(tensor.shape, generator=g).to(tensor.dtype))
    sent = fingerprints(model)

    def check(skip):
        round_weights(model, sampler, "bfloat16", skip)
        return compare_fingerprints(sent, fingerprints(sampler), history, rounding=BF16)

    report = check(("",))  # skips every tensor: nothing is sent
    assert ("old version", None, 0) in kinds(report)
    report = check(("norm",))
    names = {f.tensor for f in report.faults if f.kind != "rounding"}
    assert names == {n for n in sent if "norm" in n} and not report.agree
    assert {f.kind for f in report.faults} == {"never sent", "rounding"}
    assert check(()).agree


def test_an_update_below_one_unit_cannot_be_told_from_rounding():
    """What is held fits both versions: said to be rounding, which is all that can be said."""
    old = {"norm": torch.linspace(1, 1.9, 8)}
    new = {"norm": old["norm"] * (1 + 1e-4)}
    sent, history = fingerprints(new), [fingerprints(old)]
    held = fingerprints(rounded(old, BF16))
    report = compare_fingerprints(sent, held, history, rounding=BF16)
    assert report.agree and kinds(report) == {("rounding", "norm", None)}


def test_an_old_sync_stays_one_fault_when_some_updates_are_below_one_unit():
    old, new = states(1.0)
    old["norm"] = torch.linspace(1.001, 1.9, 8)
    new["norm"] = old["norm"] * (1 + 1e-4)
    report = compare_fingerprints(
        prints(new), prints(rounded(old, BF16)), [prints(old)], rounding=BF16
    )
    assert kinds(report) == {("old version", None, 0), ("rounding", "norm", None)}


def test_a_merge_that_rounds_twice_stays_within_one_unit():
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 64, generator=g)
    a, b = 0.1 * torch.randn(64, 4, generator=g), 0.1 * torch.randn(4, 64, generator=g)
    sent = fingerprints({"w": (weight.to(BF16).float() + a @ b).to(BF16)})
    held = fingerprints({"w": weight.to(BF16) + (a @ b).to(BF16)})
    assert sent["w"].hash != held["w"].hash
    assert kinds(compare_fingerprints(sent, held)) == {("rounding", "w", None)}
    lost = fingerprints({"w": weight.to(BF16)})
    assert kinds(compare_fingerprints(sent, lost)) == {("different", "w", None)}


def within(sent, held, dtype):
    one, other = (fingerprints({"x": torch.as_tensor(x)}) for x in (sent, held))
    return compare_fingerprints(one, other, rounding=dtype).agree


def test_the_limit_is_one_unit_in_the_last_place():
    """bfloat16 at 1: steps of 2^−7 above, of 2^−8 below. Opposite signs leave the norm alone."""
    unit = 2.0**-7
    assert within([1.0, 1.0], [1 + unit, 1 - unit / 2], BF16)
    assert not within([1.0, 1.0], [1 + 1.5 * unit, 1 - 1.5 * unit], BF16)
    assert not within([1.0, 1.0], [1 + unit, 1 - unit], torch.float16)


def test_tiny_values_beside_large_ones_round_in_equal_steps():
    """float8 scaled to a largest element of 448: below 2^−6 its steps are 2^−9."""
    values = torch.tensor([448.0, 0.0013, -0.0004, 0.01])
    held = values.to(FP8).float()
    assert held.tolist() == [448.0, 2**-9, 0.0, pytest.approx(0.009766, abs=1e-6)]
    assert within(values, held, FP8) and within(values / 100, held / 100, FP8)
    assert not within(values, held + torch.tensor([0, 0.004, 0, 0]), FP8)


def test_a_change_between_the_sampled_elements_shows_in_the_norm():
    x = torch.ones(1000)
    changed = x.clone()
    changed[7] = 9.0
    assert 9.0 not in fingerprints({"x": changed})["x"].samples
    assert not within(x, changed, BF16)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_a_difference(bad):
    broken = NEW["norm"].clone()
    broken[0] = bad
    report = compare_fingerprints(SENT, prints(NEW | {"norm": broken}), HISTORY, rounding=BF16)
    assert kinds(report) == {("different", "norm", None)}


def test_a_model_without_tensors():
    with pytest.raises(ValueError, match="model has no tensor"):
        fingerprints(nn.ReLU())


def run(values, lr=0.0, **more):
    return [
        {"step": n, "logp_gap": v, "learning_rate": lr, **more} for n, v in enumerate(values, 1)
    ]


def noise(seed, n=30, level=0.01, growth=0.0):
    rng = random.Random(seed)
    return [level * (1 + growth * i) * math.exp(0.2 * rng.gauss(0, 1)) for i in range(n)]


def test_a_gap_that_grows_without_learning_convicts_the_sync():
    verdict = lr_zero_control(run(noise(0, growth=0.05)))
    assert verdict.verdict == "convicted" and verdict.trend > 2.58
    assert "logp_gap grows at learning rate 0" in verdict.reason


def test_a_flat_gap_clears_it_and_gives_the_floor():
    verdict = lr_zero_control(run(noise(1)))
    assert verdict.verdict == "cleared" and verdict.excess is None
    assert verdict.floor == pytest.approx(0.01, rel=0.2)
    assert lr_zero_control(run(noise(1, growth=-0.02))).verdict == "cleared"
    assert lr_zero_control(run([0.0] * 10)).verdict == "cleared"  # bit for bit the same engine


def test_a_gap_that_comes_with_the_updates_is_suspected():
    verdict = lr_zero_control(run(noise(2)), run(noise(3, growth=0.2), lr=1e-4))
    assert verdict.verdict == "suspected" and verdict.excess > 2.58 > verdict.trend
    constant = lr_zero_control(run(noise(2)), run(noise(3, level=0.03), lr=1e-4))  # staleness of 1
    assert constant.verdict == "suspected"
    assert lr_zero_control(run([0.0] * 9), run([1e-3] * 9, lr=1e-4)).verdict == "suspected"


def test_a_gap_that_the_updates_do_not_change_clears_the_sync():
    verdict = lr_zero_control(run(noise(4)), run(noise(5), lr=1e-4))
    assert verdict.verdict == "cleared" and abs(verdict.excess) < 2.58
    assert lr_zero_control(run(noise(4)), run(noise(5, level=0.005), lr=1e-4)).verdict == "cleared"


def test_false_convictions_are_as_rare_as_the_threshold_says():
    """400 flat runs, each with a flat live run: about .5 % are convicted, .5 % suspected."""
    verdicts = [lr_zero_control(run(noise(n)), run(noise(n + 9999))).verdict for n in range(400)]
    assert verdicts.count("convicted") <= 6 and verdicts.count("suspected") <= 6
    loose = [lr_zero_control(run(noise(n)), z=1.28).verdict for n in range(400)]
    assert 20 <= loose.count("convicted") <= 60  # 10 %


def test_too_little_is_no_verdict():
    short, enough = run(noise(0, 7)), run(noise(0))
    for rows, live in ((short, None), (enough, short), ([], None)):
        verdict = lr_zero_control(rows, live)
        assert verdict.verdict == "insufficient evidence" and math.isnan(verdict.trend)
    sparse = [row | {"logp_gap": math.nan} if row["step"] % 5 else row for row in run(noise(0))]
    assert "6 and 0 values of logp_gap" in lr_zero_control(sparse).reason
    assert lr_zero_control(sparse, least=6).verdict == "cleared"
    assert lr_zero_control(run(noise(0)), signal="mismatch_kl").verdict == "insufficient evidence"


def test_a_control_that_learned_is_none():
    with pytest.raises(ValueError, match="step 1 has updated weights; lr must be 0"):
        lr_zero_control(run(noise(0), lr=1e-6))
    with pytest.raises(ValueError, match="has updated weights"):
        lr_zero_control(run(noise(0), update_norm=1e-9))
    assert lr_zero_control(run(noise(0), update_norm=0.0)).verdict == "cleared"


@pytest.mark.parametrize("values", [(1, 2, 3, 4, 5, 6), (1, 1, 2, 2, 3, 4), (1, 1, 1, 2, 2, 5)])
def test_the_variance_of_the_trend_by_all_orders(values):
    """Every order of the values is equally likely without a trend: the mean of S² over them."""
    from stablerl_core.system.weight_sync import _trend

    def s(order):
        return sum(ranked(order[j], order[i]) for i in range(6) for j in range(i + 1, 6))

    orders = list(permutations(values))
    spread = math.sqrt(sum(s(order) ** 2 for order in orders) / len(orders))
    assert _trend(values) == pytest.approx((s(values) - 1) / spread)


def ranked(x, y):
    return (x > y) - (x < y)


@given(*[st.lists(st.integers(0, 20), min_size=8, max_size=12)] * 2)
def test_the_rank_tests_against_their_definitions(a, b):
    """Variances by enumeration of ranks: S of Mann-Kendall, and U of the two samples."""
    from stablerl_core.system.weight_sync import _excess, _trend

    both = sorted([*a, *b])
    rank = {v: both.index(v) + (both.count(v) + 1) / 2 for v in both}
    n, m = len(a), len(b)
    mean = sum(rank[v] for v in both) / (n + m)
    spread = sum((rank[v] - mean) ** 2 for v in both) / (n + m - 1)
    total = sum(rank[v] for v in a) - n * mean
    z = total / math.sqrt(n * m / (n + m) * spread) if spread else 0.0
    assert _excess(a, b) == pytest.approx(z, abs=1e-9)
    assert _excess(b, a) == pytest.approx(-z, abs=1e-9)
    assert _trend(a) == pytest.approx(-_trend([-v for v in a]), abs=1e-9)
    if len(set(a)) == len(a):
        s = sum(ranked(a[j], a[i]) for i in range(n) for j in range(i + 1, n))
        exact = (s - ranked(s, 0)) / math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
        assert _trend(a) == pytest.approx(exact)
