"""verl's own loss, KL and advantage functions, without the engine around them.

`verl/trainer/ppo/core_algos.py` needs torch and numpy. Importing it as part of its package would
start Ray and more, so the packages above it are entered here as empty ones with the right path:
their `__init__` does not run, the modules below them are the real ones. Three names that the file
needs for type annotations and `isinstance` alone get a stand-in: TensorDict, DictConfig and
ActorConfig. Everything that computes is verl's.
"""

import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

PACKAGES = ["verl", "verl.utils", "verl.trainer", "verl.trainer.ppo", "verl.workers"]


class Config(SimpleNamespace):
    """What the losses read of an actor's configuration, with verl's defaults."""

    def __init__(self, **changes):
        defaults = dict(clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=None)
        defaults |= dict(tau_pos=1.0, tau_neg=1.05, global_batch_info={})
        super().__init__(**(defaults | changes))

    def get(self, name, default):
        return getattr(self, name, default)


def core_algos() -> ModuleType:
    """The module, or a skip that says how to get it (a failure where it is required)."""
    found = _load()
    if isinstance(found, ModuleType):
        return found
    if os.environ.get("STABLERL_REQUIRE_ORACLES"):
        pytest.fail(found)
    pytest.skip(found, allow_module_level=True)


@cache
def _load() -> ModuleType | str:
    beside = Path(sys.prefix) / "oracles" / "verl"
    spec = None if beside.is_dir() else importlib.util.find_spec("verl")
    if spec is None and not beside.is_dir():
        return f"verl is not in {beside}: `make test` puts it there (tests/oracles.txt)"
    root = beside if spec is None else Path(spec.origin).parent
    before = set(sys.modules)
    try:
        _enter_stand_ins(root)
        groups = importlib.import_module("verl.utils.groupwise")
        vars(sys.modules["verl.utils"]).update(vars(groups))
        return importlib.import_module("verl.trainer.ppo.core_algos")
    except ImportError as error:
        return f"verl in {root} cannot be read alone: {error}"
    finally:  # what the module holds stays alive; nobody else should find half a verl
        for name in set(sys.modules) - before:
            if name.split(".")[0] in ("verl", "tensordict", "omegaconf"):
                del sys.modules[name]


def _enter_stand_ins(root: Path) -> None:
    for name in PACKAGES:
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    names = {"tensordict": "TensorDict", "omegaconf": "DictConfig", "verl.workers.config": None}
    for name, attribute in names.items():
        sys.modules.setdefault(name, ModuleType(name))
        if attribute and not hasattr(sys.modules[name], attribute):
            setattr(sys.modules[name], attribute, type(attribute, (), {}))
    sys.modules["verl.workers.config"].ActorConfig = Config
