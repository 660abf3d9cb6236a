"""Console logs: what each framework prints, among everything else that ends up in that file."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from .jsons import flat, parse
from .table import Row
from .text import plain

Items = list[tuple[str, object]]

_NUMBER = r"[-+]?(?:nan|inf(?:inity)?|(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)"
_RAY = re.compile(r"^(?:\x00|\s)*(?:\((?:[\w.]+ )?pid=\d+(?:, ip=[\d.]+)?\)\s?)+")
_BAR = re.compile(r"(\d+)/(\d+) \[\d+:\d\d")


@dataclass
class Console:
    """State of the walk through a console log: where it is, and what it has recognised."""

    seen: dict[str, int] = field(default_factory=dict)  # kind of line → how often
    step: float = math.nan  # of the block that goes on
    block: str = ""  # kind of block that goes on: "skyrl", "nemo", "areal"
    bar: float = math.nan  # last position of a progress bar


def rows(lines: Iterable[str], state: Console) -> Iterator[Row]:
    """The rows of a console log."""
    for raw in lines:
        if state.block != "skyrl" and not _WORTH.search(raw):
            continue
        line = _RAY.sub("", plain(raw)) if "\x1b" in raw or "pid=" in raw else raw
        for kind, reader in _READERS:
            found = reader(line, state)
            if found is not None:
                if found:
                    state.seen[kind] = state.seen.get(kind, 0) + 1
                yield from found
                break


# A line without any of these says nothing, and most lines of a console log are such.
_WORTH = re.compile(r"step|Step|[{}]|• |│|\d/\d+ \[|Evaluated|Validation Results")

# --- verl: step:5 - critic/score/mean:0.5 - actor/lr:np.float64(1e-06) - … ------------------

_VERL = re.compile(r"\bstep:(\d+)(?= - )")
_VERL_PAIR = re.compile(rf"\s*(\S+?):(?:np\.\w+\(|tensor\()?({_NUMBER})(?![\w.])", re.IGNORECASE)


def _verl(line: str, state: Console) -> list[Row] | None:
    if " - " not in line or "step:" not in line:
        return None
    heads = list(_VERL.finditer(line))
    if not heads:
        return None
    ends = [head.start() for head in heads[1:]] + [len(line)]
    found = []
    for head, end in zip(heads, ends, strict=True):
        parts = line[head.end() + 3 : end].split(" - ")
        pairs = [_VERL_PAIR.match(part) for part in parts]
        items = [(p[1], p[2]) for p in pairs if p]
        if items:
            found.append(Row(float(head[1]), items))
    return found or None


# --- prime-rl: Step 5 | 3.2s | Loss 0.01 | Mismatch KL 0.001 | …, older with colons -----------

_PRIME = re.compile(r"(?<!Micro )\bStep (\d+) \| (.*)")
_PRIME_EVAL = re.compile(rf"\bEvaluated (\S+) \(Step (\d+)\) \| .*?\bReward:? ({_NUMBER})")
_PRIME_PART = re.compile(rf"^\s*([A-Z][\w. -]*?):? ({_NUMBER})(%?)(?![\w.])")
_PRIME_NAMES = {
    "Loss": "loss/mean",
    "Entropy": "entropy/all/mean",
    "Mismatch KL": "mismatch_kl/all/mean",
    "Grad. Norm": "optim/grad_norm",
    "LR": "optim/lr",
    "Max Vio": "max_vio/mean",
    "Reward": "reward/all/mean",
    "Seq. Length": "seq_len/all/mean",
    "Truncation": "is_truncated/all/mean",
    "Max Off-Policy": "off_policy/max",
    "Max. Off-Policy Level": "off_policy/max",
    "Routing Conf.": "routing_confidence/mean",
}


def _prime(line: str, state: Console) -> list[Row] | None:
    found = _PRIME.search(line)
    if found is None:
        score = _PRIME_EVAL.search(line)
        return [Row(float(score[2]), [(f"eval/{score[1]}/avg@1", score[3])])] if score else None
    items: Items = []
    for part in found[2].split(" | "):
        pair = _PRIME_PART.match(part)
        name = _PRIME_NAMES.get(pair[1]) if pair else None
        if name:
            items.append((name, float(pair[2]) / 100 if pair[3] else pair[2]))
    return [Row(float(found[1]), items)] if len(items) > 1 else None


# --- NeMo-RL: ===== Step 5/100 =====, then bullets -----------------------------------------

_NEMO_STEP = re.compile(r"=====+ Step (\d+)/\d+ =====+")
_NEMO_BULLET = re.compile(rf"^\s*• ([A-Z][\w ]+?): ({_NUMBER})")
_NEMO_NAMES = {
    "Loss": "train/loss",
    "Generation KL Error": "train/gen_kl_error",
    "Avg Reward": "train/reward",
    "Avg Total Reward": "train/reward",
    "Avg Filtered Reward": "train/filtered_reward",
    "Mean Generation Length": "train/mean_gen_tokens_per_sample",
    "Avg Trajectory Age": "train/avg_trajectory_age",
    "Accuracy": "validation/accuracy",
    "Total step time": "timing/train/total_step_time",
}


def _nemo(line: str, state: Console) -> list[Row] | None:
    head = _NEMO_STEP.search(line)
    if head:
        state.step, state.block = float(head[1]), "nemo"
        return []
    bullet = _NEMO_BULLET.match(line) if state.block == "nemo" else None
    if bullet is None:
        return None
    name = _NEMO_NAMES.get(bullet[1])
    return [Row(state.step, [(name, bullet[2])])] if name else []


# --- AReaL: Train step 5/500 done., then a table of names and numbers ------------------------

_AREAL_STEP = re.compile(r"Train step (\d+)/\d+ done")


def _areal(line: str, state: Console) -> list[Row] | None:
    head = _AREAL_STEP.search(line)
    if head:
        state.step, state.block = float(head[1]), "areal"
        return []
    if state.block != "areal" or "│" not in line:
        return None
    cells = [cell.strip() for cell in line.split("│")[1:-1]]
    items = [(n, v) for n, v in zip(cells[::2], cells[1::2], strict=False) if n and v]
    return [Row(state.step, items)] if items else []


# --- dictionaries, as Python or JSON writes them: TRL, slime, OpenRLHF, ROLL, SkyRL ----------

_SKYRL_STEP = re.compile(r"\bStep (\d+): *$")
_LABEL = re.compile(
    r"(?P<kind>Global step|global step|step|Step|rollout|perf|eval|iteration)\s*[:#]?\s*"
    r"(?P<number>\d+)\s*[:,]?\s*(?=\{)"
)
_JSON = re.compile(r"\{\s*\"")
_DICT = re.compile(r"\{\s*'")
_PAIR = re.compile(
    r"""'(?P<key>(?:[^'\\\n]|\\.)*)'\s*:\s*
    (?:'(?P<text>(?:[^'\\\n]|\\.)*)'|"(?:[^"\\\n]|\\.)*"
    |(?:np\.\w+\(|tensor\()?(?P<number>"""
    + _NUMBER
    + r""")(?![\w.])[^,}]*|[^,}]*)""",
    re.VERBOSE | re.IGNORECASE,
)


def _dict(line: str, state: Console) -> list[Row] | None:
    label = _LABEL.search(line)
    start = label.end() if label else -1
    if start < 0:
        opening = _DICT.search(line) or _JSON.search(line)
        if opening is None:
            return None
        start = opening.start()
    items = _pairs(line[start:])
    if items is None or sum(_is_number(v) for _, v in items) < 2:
        return None
    _progress(line[:start], state)
    step, axis = math.nan, ""
    if label:
        step, axis = float(label["number"]), label["kind"].lower().removeprefix("global ")
    return [Row(step, items, axis, state.bar)]


def _pairs(text: str) -> Items | None:
    """Names and values of a dictionary; a nested {"step": …, "metrics": {…}} is opened."""
    if _JSON.match(text):
        try:
            record = parse(text[: text.rindex("}") + 1])
        except ValueError:
            return None
        items = list(flat(record)) if type(record) is dict else []
        return [(name.removeprefix("metrics/"), value) for name, value in items]
    return [(m["key"], m["number"] or m["text"]) for m in _PAIR.finditer(text)]


def _skyrl(line: str, state: Console) -> list[Row] | None:
    """`Step 5:` and a dictionary that `pprint` spreads over the lines that follow."""
    head = _SKYRL_STEP.search(line)
    if head is None:
        if state.block != "skyrl" or not line.startswith(("{'", " '")):
            return None
        state.block = "" if line.rstrip().endswith("}") else "skyrl"
        return [Row(state.step, _pairs(line) or [])]
    state.step, state.block = float(head[1]), "skyrl"
    return []


def _is_number(value: object) -> bool:
    return type(value) in (int, float) or type(value) is str and bool(_FULL.fullmatch(value))


_FULL = re.compile(_NUMBER, re.IGNORECASE)


def _progress(line: str, state: Console) -> list[Row] | None:
    bars = _BAR.findall(line)
    if not bars:
        return None
    state.bar = float(bars[-1][0])
    return []


_READERS: tuple[tuple[str, Callable[[str, Console], list[Row] | None]], ...] = (
    ("verl", _verl),
    ("prime-rl", _prime),
    ("nemo-rl", _nemo),
    ("areal", _areal),
    ("skyrl", _skyrl),
    ("dict", _dict),
    ("bar", _progress),
)
