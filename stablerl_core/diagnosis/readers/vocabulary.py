"""How a column's name is looked up in the names of a framework, and a framework told by them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, lru_cache

from ..signals import signal_of
from . import names


@dataclass(frozen=True)
class Entry:
    """One line: a column's name as a pattern, and what it is."""

    column: str
    signal: str
    meaning: str
    factor: float
    offset: float
    rank: int  # position in its list: the lower, the rather it is taken

    @property
    def exact(self) -> bool:
        return "{}" not in self.column


def _entry(line: str, rank: int) -> Entry:
    left, _, meaning = line.partition(" ; ")
    column, signal, *extra = left.split()
    factor = next((float(e[1:]) for e in extra if e[0] == "x"), 1.0)
    offset = next((float(e) for e in extra if e[0] == "+"), 0.0)
    known = signal_of(signal.replace("{}", "any"))
    if known is None:
        raise ValueError(f"{column}: {signal!r} is no signal")
    text = f"{known.meaning}; {meaning.strip()}" if meaning.strip() else known.meaning
    return Entry(column, signal, text, factor, offset, rank)


@dataclass(frozen=True)
class Dialect:
    """A framework's vocabulary, and what tells that a file is in it.

    `marks` matches names that no other framework writes; `prefixes` are what trackers put before a
    name, and what stands there instead without them; `notes` say what no log of it can show.
    """

    name: str
    entries: tuple[Entry, ...]
    marks: re.Pattern
    prefixes: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def lookup(self, column: str) -> Entry | None:
        """What a column is, its `{}` filled in; None if the framework writes no such name."""
        for name in self.names(column):
            entry = _exact(self.name).get(name) or _match(self.name, name)
            if entry is not None:
                return entry
        return None

    def names(self, column: str) -> list[str]:
        """The column's name, and without a tracker's prefix."""
        column = tidy(column)
        bare = (new + column[len(old) :] for old, new in self.prefixes if column.startswith(old))
        return [column, *bare]


def _dialect(name, table, marks, prefixes=(), notes=()) -> Dialect:
    lines = [line for line in table.splitlines() if line.strip()]
    entries = tuple(_entry(line, rank) for rank, line in enumerate(lines))
    return Dialect(name, entries, re.compile(marks), prefixes, notes)


_HF_NOTES = (
    "A NaN loss may be hidden: the Hugging Face Trainer logs the running mean in its place "
    "(logging_nan_inf_filter), and TRL leaves a metric out that was NaN.",
    "TRL writes `kl` only where beta is not 0: without it nothing is known of the reference.",
)

DIALECTS: dict[str, Dialect] = {
    d.name: d
    for d in (
        _dialect(
            "trl",
            names.TRL,
            r"(train/)?(eval_)?(reward_std|frac_reward_zero_std|completion_length|completions/.+"
            r"|rewards/.+|clip_ratio/.+|sampling/.+|rollout_correction/.+|objective/.+"
            r"|policy/approxkl_avg|global_step/max_steps)",
            (("train/", ""), ("eval/", "eval_")),
            _HF_NOTES,
        ),
        _dialect(
            "verl",
            names.VERL,
            r"actor/(pg_clipfrac|ppo_kl|entropy_loss|lr\(1e-4\)|reward_kl_penalty).*|critic/vf_.+"
            r"|response_length/.+|val-(core|aux)/.+|val/test_score/.+|training/.+|rollout_corr/.+"
            r"|mismatch/.+|timing_s/.+|global_seqlen/.+",
            (),
            ("verl's file logger writes null for NaN and for infinity: both are read as NaN.",),
        ),
        _dialect(
            "slime",
            names.SLIME,
            r"rollout/(raw_reward|response_len.*|truncated.*|zero_std/.+|log_probs)|train/ois"
            r"|train/(train_rollout_logprob_abs_diff|lr-pg_\d+|pg_clipfrac|tis.*)",
            (),
            ("`rollout/rewards` and advantages are centred in slime: a flat 0 is normal.",),
        ),
        _dialect(
            "openrlhf",
            names.OPENRLHF,
            r"(train/)?(actor_lr|actor_grad_norm|ppo_clip_ratio|vllm_kl|group_reward_std|act_loss"
            r"|dynamic_filtering_pass_rate|timing/(make_experience|ppo_train|step_total)"
            r"|rollout/(reward_mean|response_length_mean|truncated_rate))",
            (("train/", ""), ("eval/", "")),
        ),
        _dialect(
            "prime-rl",
            names.PRIME_RL,
            r"(mismatch_kl|is_masked|max_vio|ref_kl)/.+|train/agg/.+|optim/grad_norm|entropy/all/.+"
            r"|(seq_len|decode_len|reward|is_truncated|num_turns)/all/.+|off_policy/.+|solved?_.+",
            (),
            (
                "prime-rl writes two logs, trainer and orchestrator: each shows its own half.",
                "prime-rl's file logger leaves NaN and infinity out.",
            ),
        ),
        _dialect(
            "nemo-rl",
            names.NEMO_RL,
            r"train/(gen_kl_error|policy_kl_error|token_mult_prob_error|js_divergence_error"
            r"|probs_ratio.*|mean_gen_tokens_per_sample|global_valid_toks|approx_entropy)"
            r"|validation/accuracy|timing/train/.+",
        ),
        _dialect(
            "skyrl",
            names.SKYRL,
            r"policy/(policy_.+|final_loss|loss_metrics/.+|rollout_train_.+|raw_grad_norm"
            r"|ppo_clip_ratio)|reward/avg_.+|generate/.+|loss/avg_.+|trainer/global_step",
            (),
            (
                "SkyRL's is_ratio_min is 0 whenever a sequence is padded, and its is_ratio_std "
                "counts padding: neither is used.",
            ),
        ),
        _dialect(
            "areal",
            names.AREAL,
            r"(ppo|grpo)_actor/.+|eval-rollout/.+|timeperf/.+",
            (("ppo_actor/", ""), ("grpo_actor/", "")),
        ),
        _dialect(
            "roll",
            names.ROLL,
            r"actor/(ppo_ratio_.+|approxkl|policykl|total_loss|train_infer_.+|ratio_(mean|max|min)"
            r"|max_len_mask_ratio|difficulty_mask_ratio)|tokens?/.+|group/.+|val_correct/.+"
            r"|system/(global_step|samples|batch_size)|scheduler/.+|critic/entropy/mean",
            (),
            (
                "ROLL's actor/max_len_mask_ratio is 1 also where the mask is switched off: it is "
                "not read as truncation.",
            ),
        ),
        _dialect(
            "tinker",
            names.TINKER,
            r"progress/(batch|done_frac)|optim/kl_sample_train_v\d|(test/)?env/all/.+"
            r"|kl_pre_post_v\d|by_group/.+|sampling_client/.+",
        ),
        _dialect(
            "sb3",
            names.SB3,
            r"rollout/ep_.+_mean|time/total_timesteps|train/(approx_kl|clip_fraction|n_updates"
            r"|policy_gradient_loss|explained_variance|clip_range)",
            (),
            ("Stable-Baselines3 logs environment steps; its episodes are not completions.",),
        ),
    )
}

TRL_ASYNC_ENTRIES = {
    entry.column: entry
    for entry in (_entry(line, 0) for line in names.TRL_ASYNC.splitlines() if line.strip())
}

ALIASES = {
    "unsloth": "trl",
    "ms-swift": "trl",
    "swift": "trl",
    "nemo": "nemo-rl",
    "prime": "prime-rl",
}


@cache
def _exact(dialect: str) -> dict[str, Entry]:
    entries = DIALECTS[dialect].entries
    return {e.column: e for e in reversed(entries) if e.exact}


@cache
def _patterns(dialect: str) -> tuple[tuple[re.Pattern, Entry], ...]:
    found = [e for e in DIALECTS[dialect].entries if not e.exact]
    return tuple((_pattern(e.column), e) for e in found)


def _pattern(column: str) -> re.Pattern:
    """`{}` is a part of a path; in `val-core/{}/mean@{}` the first may hold slashes."""
    one = r"(.+)" if column.startswith(("val-core/", "val/test_score/")) else r"([^/]+)"
    return re.compile(re.escape(column).replace(re.escape("{}"), one))


@lru_cache(maxsize=4096)
def _match(dialect: str, column: str) -> Entry | None:
    for pattern, entry in _patterns(dialect):
        found = pattern.fullmatch(column)
        if found:
            signal = entry.signal
            for part in found.groups():
                signal = signal.replace("{}", part, 1)
            return Entry(column, signal, entry.meaning, entry.factor, entry.offset, entry.rank)
    return None


def tidy(column: str) -> str:
    """A name without unsloth's blanks around its slashes and ROLL's `@sum` at its end."""
    return _UNTIDY.sub(lambda m: "/" if "/" in m[0] else "", column)


_UNTIDY = re.compile(r"\s*/\s*|@(?:sum|mean|max|min)$")


def recognise(columns) -> Dialect | None:
    """The framework whose names most of the columns are; None without a name only it writes."""
    columns = [tidy(c) for c in columns]
    best, most = None, 0
    for dialect in DIALECTS.values():
        if not any(dialect.marks.fullmatch(c) for c in columns):
            continue
        known = sum(dialect.lookup(c) is not None for c in columns)
        marked = sum(dialect.marks.fullmatch(c) is not None for c in columns)
        if known and known + marked > most:
            best, most = dialect, known + marked
    return best


def columns_of(dialect: str, signal: str) -> list[str]:
    """The names under which a framework logs a signal: what to switch on where it is missing."""
    name = ALIASES.get(dialect, dialect)
    return (
        [e.column for e in DIALECTS[name].entries if e.signal == signal] if name in DIALECTS else []
    )
