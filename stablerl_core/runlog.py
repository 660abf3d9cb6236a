"""The run log: one row of canonical signals a step, in a file that survives a crash."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Signal:
    """What one column of a run log means: its layer (0 = bookkeeping), unit and definition."""

    layer: int
    unit: str
    meaning: str


SIGNALS: dict[str, Signal] = {
    "step": Signal(0, "optimizer steps of the outer loop", "number of this row, from 1"),
    "seconds": Signal(0, "s", "wall-clock time of the step, probes included"),
    "reward": Signal(1, "reward", "mean training reward over all completions of the step"),
    "heldout_accuracy": Signal(
        1, "share", "strict accuracy of sampled answers (temperature 1) to held-out problems"
    ),
    "length": Signal(1, "tokens", "mean completion length, the end token included"),
    "truncated": Signal(1, "share", "completions cut at the token limit"),
    "zero_variance_groups": Signal(1, "share", "groups whose rewards are all equal: no gradient"),
    "solved_groups": Signal(
        1, "share", "zero-variance groups at the step's highest reward, if above 0"
    ),
    "drawn_groups": Signal(
        1, "groups", "groups sampled for the step, with dynamic sampling; all count in layer 1"
    ),
    "kl_ref": Signal(2, "nats/token", "exact KL(policy ‖ reference), mean over sampled positions"),
    "kl_step": Signal(
        2, "nats/token", "exact KL(before ‖ after) of this step's updates, mean over positions"
    ),
    "entropy": Signal(2, "nats/token", "exact entropy of the distribution sampled from"),
    "clip_fraction": Signal(2, "share", "trained tokens whose gradient the ratio clip removed"),
    "ratio_max": Signal(2, "ratio", "largest policy ratio π_θ/π_old among trained tokens"),
    "positive_share": Signal(
        2, "share", "Â > 0 tokens' share of Σ |∂loss/∂log π_θ|, over all updates of the step"
    ),
    "clip_low": Signal(2, "1", "ε_low in force, where a schedule or BAPO sets it"),
    "clip_high": Signal(2, "1", "ε_high in force, where a schedule or BAPO sets it"),
    "kl_coef": Signal(2, "1", "weight of the KL penalty in force, where a schedule sets it"),
    "entropy_coef": Signal(2, "1", "weight of the entropy bonus in force, where scheduled"),
    "temperature": Signal(2, "1", "sampling temperature in force, where a schedule sets it"),
    "group_size": Signal(1, "completions", "completions of a prompt, where a schedule sets it"),
    "prompts": Signal(1, "prompts", "prompts of the step, where a schedule sets it"),
    "loss": Signal(3, "loss", "the loss that was differentiated, last update of the step"),
    "grad_norm": Signal(3, "2-norm", "gradient norm before clipping, largest of the step"),
    "update_norm": Signal(3, "2-norm", "norm of the parameter change of the whole step"),
    "learning_rate": Signal(3, "1", "learning rate of the last update"),
    "attention_logit_max": Signal(
        3,
        "logit",
        "largest q·k/√d of any head in the updates of a probed step, where QK-Clip is on",
    ),
    "clipped_heads": Signal(
        3, "heads", "heads whose query and key weights QK-Clip shrank, over all updates of the step"
    ),
    "nonfinite": Signal(3, "count", "updates of the step with a non-finite loss or gradient"),
    "logp_gap": Signal(
        4, "nats", "mean |log π_old(token) − log μ(token)|: trainer against sampler, same tokens"
    ),
    "logp_gap_max": Signal(4, "nats", "largest such gap of the step"),
    "mismatch_kl": Signal(
        4, "nats/token", "k3 estimate of KL(μ ‖ π_old); the tokens were drawn from μ"
    ),
    "weight_ess": Signal(
        4, "share", "effective sample size (E w)²/E w² of the importance weights before their cap"
    ),
    "masked_tokens": Signal(
        4, "share", "tokens with an advantage that a correction or an off-policy mask set to 0"
    ),
    "lost_tokens": Signal(
        4,
        "share",
        "trained tokens outside of the sets that the trainer's own filter leaves; they leave the "
        "loss",
    ),
    "staleness": Signal(4, "versions", "trainer version minus version of the sampler's weights"),
    "expert_load_max": Signal(
        4, "ratio", "busiest expert's load over the mean load, worst layer; 1 is balance"
    ),
}

# One signal a name, for what a run names itself: `reward_part:format`.
FAMILIES: dict[str, Signal] = {
    "reward_part": Signal(1, "reward", "mean of one reward component of several, unweighted"),
}


def _unknown(names: Iterable[str]) -> list[str]:
    """The names that are neither a signal nor a member of a family."""
    return sorted(n for n in names if n not in SIGNALS and n.partition(":")[0] not in FAMILIES)


class RunLog:
    """Rows of canonical signals in memory and, given a path, in a JSONL file as they come.

    The first line of the file is a header (`{"header": …}`: configuration and provenance), each
    other line a row. A row is written with one `write` and flushed, so a killed process leaves
    every finished step behind and at most one torn last line, which `RunLog.read` drops. NaN
    and infinity are kept as they are; a signal not measured at a step is simply absent.

    Appending a step that is already in the log changes nothing: a resumed run replays the steps
    since its checkpoint and the log keeps the first account of them.
    """

    def __init__(self, path: str | os.PathLike | None = None, header: Mapping | None = None):
        self.path = None if path is None else Path(path)
        self.header = dict(header or {})
        self.rows: list[dict] = []
        self._end = 0  # bytes of whole lines in the file
        if self.path is not None:
            if self.path.exists() and self.path.stat().st_size:
                raise ValueError(f"path={str(path)!r} holds a log; RunLog.read(path) continues it")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write({"header": self.header})

    def append(self, row: Mapping[str, float]) -> None:
        """Add one row; `row["step"]` must follow the last step. Unknown signals are an error."""
        unknown = _unknown(row)
        if unknown:
            raise ValueError(f"row has unknown signals {unknown}; see runlog.SIGNALS")
        if self.rows and row["step"] <= self.rows[-1]["step"]:
            return
        if self.path is not None:
            self._write(dict(row))
        self.rows.append(dict(row))

    def _write(self, record: dict) -> None:
        line = (json.dumps(record) + "\n").encode()
        try:
            self._cut()
            with open(self.path, "ab") as file:
                file.write(line)
        except OSError as error:
            self._cut()
            raise OSError(
                error.errno,
                f"cannot write the run log ({error.strerror}); the {len(self.rows)} steps before "
                "are intact: free some space and resume the run",
                str(self.path),
            ) from error
        self._end += len(line)

    def _cut(self) -> None:
        """Take half a line off the end of the file, or the next row would be glued to it."""
        if self.path.is_file() and self.path.stat().st_size > self._end:
            os.truncate(self.path, self._end)

    @classmethod
    def read(cls, path: str | os.PathLike) -> RunLog:
        """Read a run log, also one that is being written; appending to it continues the file.

        A torn last line is left out, and cut off the file by the next append. Raises
        `FileNotFoundError`, and `ValueError` for any other line that is not a record.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"path={str(path)!r}: no run log there")
        log = cls()
        lines = path.read_bytes().splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            if number == len(lines) and not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: not a JSON record ({error})") from None
            if not isinstance(record, dict) or not record.keys() & {"header", "step"}:
                raise ValueError(f"{path}, line {number}: neither a header nor a row with a step")
            log._end += len(line)
            if "header" in record:
                log.header = record["header"]
            else:
                log.rows.append(record)
        log.path = path
        return log

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict]:
        return iter(self.rows)

    def series(self, signal: str) -> tuple[list[int], list[float]]:
        """Steps and values of one signal, at the steps where it was measured."""
        if _unknown([signal]):
            raise ValueError(f"signal={signal!r} is unknown; known: {', '.join(SIGNALS)}")
        pairs = [(row["step"], row[signal]) for row in self.rows if signal in row]
        return [s for s, _ in pairs], [v for _, v in pairs]

    def last(self, signal: str, n: int = 1) -> float:
        """Mean of the last `n` measured values of a signal; NaN when it was never measured."""
        values = self.series(signal)[1][-n:]
        return sum(values) / len(values) if values else math.nan
