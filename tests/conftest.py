"""Shared by all tests: repeatable properties, and no more threads than the machine has to lend."""

import torch
from hypothesis import settings

settings.register_profile("stablerl", derandomize=True, deadline=None, database=None)
settings.load_profile("stablerl")
torch.set_num_threads(1)  # two that wait for each other on a busy machine take many times as long
