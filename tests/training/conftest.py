"""One thread: on a busy machine two that wait for each other take a hundred times as long."""

import torch

torch.set_num_threads(1)
