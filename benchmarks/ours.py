"""Our side: `Trainer` with its defaults, and laps between the parts of a step."""

from __future__ import annotations

from pathlib import Path

from workload import GROUP, Case, Stopwatch

from stablerl_core.training import DataConfig, Trainer, TrainerConfig

NEVER = 10**9


class Ours(Trainer):
    """A `Trainer` on a case. Its probes stay on; held-out evaluation is off, as on the other side.

    `tokens` has, for each step, how many completion tokens were generated and how many of them
    were differentiated: groups with equal rewards are left out, since they have no gradient.
    `asked` has the ids of its prompts.
    """

    def __init__(self, case: Case, checkpoint: Path):
        data = DataConfig(
            prompts=case.prompts,
            group_size=GROUP,
            max_new_tokens=case.new_tokens,
            eval_every=NEVER,
            eval_prompts=1,
        )
        self.watch, self.tokens, self.rewards, self.asked = Stopwatch(), [], [], []
        config = TrainerConfig(base=str(checkpoint), steps=NEVER, data=data)
        super().__init__(config, reward=case.reward)

    def step(self) -> dict:
        self.watch.start()
        row = super().step()
        self.watch.lap("other")
        self.rewards.append(row["reward"])
        return row

    def _collect(self, n):
        collected = super()._collect(n)
        self.watch.lap("generate")
        return collected

    def _update(self, batch, advantages):
        self.watch.lap("other")
        trained = batch.mask[advantages != 0]
        self.tokens.append((int(batch.mask.sum()), int(trained.sum())))
        self.asked.append(batch.prompt[::GROUP])
        self._running = "forward"
        laps = self.model.register_forward_pre_hook(lambda *_: self._lap("forward"))
        row = super()._update(batch, advantages)
        laps.remove()
        return row

    def _lap(self, begins: str) -> None:
        """One part of the update ends and another begins; a micro-batch has both."""
        self.watch.lap(self._running)
        self._running = begins

    def _loss(self, *args):
        loss = super()._loss(*args)
        self._lap("backward")
        return loss

    def _apply(self, loss):
        self._lap("other")
        applied = super()._apply(loss)
        self.watch.lap("optimizer")
        return applied
