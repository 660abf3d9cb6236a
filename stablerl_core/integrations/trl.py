"""TRL: a callback that names the layer while the run goes on."""

from __future__ import annotations

from transformers import TrainerCallback

from ..diagnosis import Diagnosis
from ..diagnosis.live import LiveDiagnosis


class DiagnosisCallback(TrainerCallback):
    """`GRPOTrainer(…, callbacks=[DiagnosisCallback()])`: diagnose what the trainer logs.

    Every `every` logged rows the run so far is diagnosed on the main process; a layer that was
    not named before is told once, as a warning of the logger "stablerl". `diagnosis` holds the
    last one, `live.rows` what was logged. It changes nothing in the training.
    """

    def __init__(self, every: int = 10):
        self.live = LiveDiagnosis(every, format="trl")

    @property
    def diagnosis(self) -> Diagnosis | None:
        """The last diagnosis, None before the first."""
        return self.live.diagnosis

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Take in the row that was just logged."""
        if state.is_world_process_zero and logs:
            self.live.add({"step": state.global_step} | logs)
