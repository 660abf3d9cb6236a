"""The starting points: small models taught the answer format, and half of the answers.

python -m stablerl_core.training.base            rebuild all and say whether they match
python -m stablerl_core.training.base --write    rebuild and replace the shipped files
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import string
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm.auto import trange

from ..rewards import MARKER, Problem, Task, strict_reward, task_by_name
from .models import PRESETS, small_moe
from .rollout import decode_completions, encode_prompts, rollout

ASSETS = Path(__file__).parent.parent / "assets" / "base"


@dataclass(frozen=True)
class Recipe:
    """A supervised warm start: everything that decides its weights, on one kind of machine.

    `draft_share` of the demonstrations hold one to `max_drafts` wrong drafts before the final
    answer, so that longer answers exist and length can be gamed.
    """

    task: str
    steps: int
    preset: str = "mixtral-cpu"
    task_options: dict = field(default_factory=dict)
    batch: int = 256
    learning_rate: float = 3e-3
    draft_share: float = 0.25
    max_drafts: int = 2
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.preset}-{self.task}"


WORDS = dict(min_word_len=4, max_word_len=5)
RECIPES = {
    r.name: r
    for r in (
        Recipe(task="sort", steps=80),
        Recipe(task="add", steps=480),
        Recipe(task="spell_backward", steps=180, batch=128, task_options=WORDS),
    )
}


def demonstration(problem: Problem, recipe: Recipe, rng: random.Random) -> str:
    """A completion to imitate: the marked answer, sometimes after wrong drafts of it."""
    drafts = 0
    if rng.random() < recipe.draft_share:
        drafts = rng.randint(1, recipe.max_drafts)
    texts = [_corrupt(problem.gold, rng) for _ in range(drafts)] + [problem.gold]
    return "".join(MARKER + text for text in texts)


def _corrupt(gold: str, rng: random.Random) -> str:
    """The answer with one digit replaced by another, or one letter where it has no digits."""
    places = [i for i, c in enumerate(gold) if c.isdigit()] or range(len(gold))
    i = rng.choice(places)
    others = string.digits if gold[i].isdigit() else string.ascii_lowercase
    return gold[:i] + rng.choice([c for c in others if c != gold[i]]) + gold[i + 1 :]


def train_base(recipe: Recipe, progress: bool = True, device: str | torch.device = "cpu"):
    """Train a recipe's model from scratch; returns (model, tokenizer). Seconds, not minutes."""
    model, tokenizer = small_moe(recipe.preset, seed=recipe.seed, device=device)
    task = task_by_name(recipe.task, recipe.task_options)
    rng = random.Random(recipe.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    silent = {} if progress else {"disable": True}  # absent, TQDM_DISABLE decides
    for step in trange(recipe.steps, desc=f"base {recipe.name}", **silent):
        rate = min(1.0, (step + 1) / 10) * min(1.0, 5 * (1 - step / recipe.steps))
        optimizer.param_groups[0]["lr"] = recipe.learning_rate * rate
        ids, counted = demonstrations(tokenizer, task, recipe, rng, seed=step)
        imitation_loss(model, ids.to(device), counted.to(device)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model, tokenizer


def demonstrations(tokenizer, task: Task, recipe: Recipe, rng: random.Random, seed: int):
    """A batch to imitate: ids (B, W) padded on the right, and a mask that counts completions.

    `seed` draws the problems, `rng` their drafts.
    """
    problems = task.sample("train", recipe.batch, seed=seed)
    return _pack(tokenizer, problems, [demonstration(p, recipe, rng) for p in problems])


def imitation_loss(model, ids: Tensor, counted: Tensor) -> Tensor:
    """Mean −log π_θ of the counted tokens, in nats; what the demonstrations sampled."""
    logits = model(ids[:, :-1], use_cache=False).logits
    return cross_entropy(logits[counted[:, 1:]], ids[:, 1:][counted[:, 1:]])


def _pack(tokenizer, problems: list[Problem], completions: list[str]):
    """Ids (B, W) padded on the right, and a mask that counts completion tokens only."""
    pairs = [
        (tokenizer(p.prompt).input_ids, tokenizer(c).input_ids + [tokenizer.eos_token_id])
        for p, c in zip(problems, completions, strict=True)
    ]
    width = max(len(p) + len(c) for p, c in pairs)
    ids = torch.full((len(pairs), width), tokenizer.pad_token_id)
    counted = torch.zeros(ids.shape, dtype=torch.bool)
    for row, (p, c) in enumerate(pairs):
        ids[row, : len(p) + len(c)] = torch.tensor(p + c)
        counted[row, len(p) : len(p) + len(c)] = True
    return ids, counted


def pass_rate(
    model, tokenizer, task: Task, n: int, max_new_tokens: int = 24, seed: int = 1
) -> float:
    """Share of `n` held-out problems answered right by one sample at temperature 1, strictly."""
    problems = task.sample("heldout", n, seed=seed)
    prompt, mask = encode_prompts(tokenizer, [p.prompt for p in problems], model.device)
    batch = rollout(
        model,
        prompt,
        mask,
        group_size=1,
        max_new_tokens=max_new_tokens,
        eos_token_id=tokenizer.eos_token_id,
        generator=torch.Generator(device=model.device).manual_seed(seed),
    )
    texts = decode_completions(tokenizer, batch)
    return sum(strict_reward(texts, problems, (~batch.finished).tolist())) / n


def load_base(name: str, device: str | torch.device = "cpu"):
    """A shipped starting point by name (`mixtral-cpu-sort`): returns (model, tokenizer).

    Raises `ValueError` for an unknown name and for a file that is damaged.
    """
    if name not in RECIPES:
        raise ValueError(f"base={name!r} is not shipped; shipped: {', '.join(RECIPES)}")
    model, tokenizer = small_moe(RECIPES[name].preset)
    path = ASSETS / f"{name}.safetensors"
    try:
        state = load_file(path)
        if fingerprint(state) != json.loads(path.with_suffix(".json").read_text())["sha256"]:
            raise RuntimeError("its hash is not the one on its card")
        model.load_state_dict(state)
    except (SafetensorError, RuntimeError, OSError) as error:
        why = str(error).split("\n")[0]
        raise ValueError(f"{path} is damaged ({why}); rebuild it with: make base") from error
    return model.to(device), tokenizer


def options_of(task: str) -> dict:
    """The options with which the warm starts know a task; none for a task without one."""
    return next((r.task_options for r in RECIPES.values() if r.task == task), {})


def starting_point(base: str, task: str, device: str | torch.device):
    """The model and tokenizer that a run starts from.

    `base` is a preset (shipped for the task, or else warmed up here by the recipe of the shipped
    one, which takes a while) or a checkpoint, taken as it is. Raises `ValueError` for a preset
    and a task without a recipe.
    """
    if f"{base}-{task}" in RECIPES:
        return load_base(f"{base}-{task}", device)
    if base not in PRESETS:
        return small_moe(base, device=device)
    recipes = [recipe for recipe in RECIPES.values() if recipe.task == task]
    if not recipes:
        known = ", ".join(sorted({recipe.task for recipe in RECIPES.values()}))
        raise ValueError(f"task={task!r} has no warm start for base={base!r}; tasks: {known}")
    return train_base(replace(recipes[0], preset=base), device=device)


def fingerprint(state: dict[str, torch.Tensor]) -> str:
    """SHA-256 over names and bytes of all tensors."""
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode() + state[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


def build(recipe: Recipe, write: bool) -> bool:
    """Rebuild one starting point, compare it with the shipped one, print the verdict."""
    started = time.perf_counter()
    model, tokenizer = train_base(recipe)
    seconds = time.perf_counter() - started
    task = task_by_name(recipe.task, recipe.task_options)
    rate = pass_rate(model, tokenizer, task, 1024)
    state = {k: v.contiguous() for k, v in model.state_dict().items()}
    path, card = ASSETS / f"{recipe.name}.safetensors", ASSETS / f"{recipe.name}.json"
    facts = {"recipe": asdict(recipe), "sha256": fingerprint(state), "heldout_pass_rate": rate}
    if write:
        ASSETS.mkdir(parents=True, exist_ok=True)
        save_file(state, path)
        path.chmod(0o644)
        card.write_text(json.dumps(facts | {"torch": torch.__version__}, indent=1) + "\n")
    shipped = json.loads(card.read_text())
    same = shipped["sha256"] == facts["sha256"]
    apart = max(float((a - state[k]).abs().max()) for k, a in load_file(path).items())
    print(
        f"{recipe.name}: {seconds:.0f} s, held-out pass rate {rate:.3f} (shipped "
        f"{shipped['heldout_pass_rate']:.3f}); weights "
        + ("bit-identical" if same else f"differ by up to {apart:.2g}")
    )
    return same or abs(rate - shipped["heldout_pass_rate"]) < 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="replace the shipped files")
    parser.add_argument("names", nargs="*", help=f"which ones; default all: {', '.join(RECIPES)}")
    options = parser.parse_args()
    results = [build(RECIPES[n], options.write) for n in options.names or RECIPES]
    raise SystemExit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
