"""Chapter 00, a run that looks healthy: one rising reward, four explanations.

Written before the repeated runs (one exploratory seed had been seen): see `PREDICTION`.
"""

from __future__ import annotations

from ..training import DataConfig, NumericsConfig, PolicyConfig, SystemConfig, TrainerConfig
from .experiment import Experiment
