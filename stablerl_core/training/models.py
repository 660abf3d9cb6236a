"""Small Hugging Face mixture-of-experts models, built from a config: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3MoeConfig,
)

from .tokenizer import character_tokenizer

SCALES = {
    "cpu": dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16),
    "gpu": dict(hidden_size=512, num_hidden_layers=8, num_attention_heads=8, head_dim=64),
}
EXPERTS = {"cpu": dict(experts=8, top_k=2, width=64), "gpu": dict(experts=32, top_k=4, width=256)}
MAX_POSITIONS = 1024


def _mixtral(size: dict, moe: dict) -> PretrainedConfig:
    """Grouped-query attention without QK-norm; softmax over the chosen experts."""
    return MixtralConfig(
        **size,
        num_key_value_heads=size["num_attention_heads"] // 2,
        num_local_experts=moe["experts"],
        num_experts_per_tok=moe["top_k"],
        intermediate_size=moe["width"],
        sliding_window=None,
    )


def _qwen3(size: dict, moe: dict) -> PretrainedConfig:
    """Grouped-query attention with QK-norm; renormalised top-k gates."""
    return Qwen3MoeConfig(
        **size,
        num_key_value_heads=size["num_attention_heads"] // 2,
        num_experts=moe["experts"],
        num_experts_per_tok=moe["top_k"],
        moe_intermediate_size=moe["width"],
        intermediate_size=2 * moe["width"],
        norm_topk_prob=True,
    )


def _olmoe(size: dict, moe: dict) -> PretrainedConfig:
    """Multi-head attention with QK-norm over the whole projection; gates not renormalised."""
    return OlmoeConfig(
        hidden_size=size["hidden_size"],
        num_hidden_layers=size["num_hidden_layers"],
        num_attention_heads=size["num_attention_heads"],
        num_key_value_heads=size["num_attention_heads"],
        num_experts=moe["experts"],
        num_experts_per_tok=moe["top_k"],
        intermediate_size=moe["width"],
    )


def _deepseek_v3(size: dict, moe: dict) -> PretrainedConfig:
    """Multi-head latent attention; sigmoid router with a selection bias and a shared expert."""
    head = size["head_dim"]
    return DeepseekV3Config(
        hidden_size=size["hidden_size"],
        num_hidden_layers=size["num_hidden_layers"],
        num_attention_heads=size["num_attention_heads"],
        num_key_value_heads=size["num_attention_heads"],
        q_lora_rank=3 * head,
        kv_lora_rank=2 * head,
        qk_nope_head_dim=head,
        qk_rope_head_dim=head // 2,
        v_head_dim=head,
        n_routed_experts=moe["experts"],
        num_experts_per_tok=moe["top_k"],
        moe_intermediate_size=moe["width"],
        intermediate_size=4 * moe["width"],
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        first_k_dense_replace=0,
    )


FAMILIES = {
    "mixtral": _mixtral,
    "qwen3-moe": _qwen3,
    "olmoe": _olmoe,
    "deepseek-v3": _deepseek_v3,
}
PRESETS = tuple(f"{family}-{scale}" for family in FAMILIES for scale in SCALES)


def small_moe(
    preset: str = "mixtral-cpu",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    experts_implementation: str = "grouped_mm",
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A Hugging Face mixture-of-experts model and its tokenizer.

    `preset` is a name in `PRESETS` (family and scale, random weights drawn from `seed`) or the
    path or hub id of a saved checkpoint, which brings its own tokenizer. The `cpu` scale has
    about 0.25 million parameters, the `gpu` scale about 107 million.

    `experts_implementation` is transformers' own switch: `grouped_mm` is the fastest on CPU and
    GPU but has no float64 on CPU; exactness tests use `eager`.

    Raises `ValueError` for a name that is neither a preset nor a checkpoint, for a checkpoint
    that does not load, and for one without a router.
    """
    if preset in PRESETS:
        model, tokenizer = _from_config(preset, seed, experts_implementation)
    elif Path(preset, "config.json").is_file() or _looks_like_hub_id(preset):
        model, tokenizer = _from_checkpoint(preset, experts_implementation)
    else:
        raise ValueError(
            f"preset={preset!r} is neither a preset nor a checkpoint folder; "
            f"presets: {', '.join(PRESETS)}"
        )
    if not routers(model):
        raise ValueError(f"preset={preset!r} is {type(model).__name__}, which has no MoE router")
    return model.to(device=device, dtype=dtype).eval(), tokenizer


def _looks_like_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/"))


def _from_checkpoint(preset: str, experts_implementation: str):
    try:
        tokenizer = AutoTokenizer.from_pretrained(preset)
        model = AutoModelForCausalLM.from_pretrained(
            preset, experts_implementation=experts_implementation, use_safetensors=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        why = str(error).split("\n")[0]
        raise ValueError(f"preset={preset!r} does not load as an MoE checkpoint: {why}") from error
    return model, tokenizer


def _from_config(preset: str, seed: int, experts_implementation: str):
    family, scale = preset.rsplit("-", 1)
    tokenizer = character_tokenizer()
    config = FAMILIES[family](SCALES[scale], EXPERTS[scale])
    config.vocab_size = len(tokenizer)
    config.max_position_embeddings = MAX_POSITIONS
    config.tie_word_embeddings = False
    config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    config.bos_token_id = None
    config._experts_implementation = experts_implementation
    with torch.random.fork_rng(devices=[]):
        # Inside fork_rng the caller's global stream is untouched; torch.manual_seed would also
        # reseed every accelerator.
        torch.default_generator.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model, tokenizer


def routers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The router modules by name: their forward returns (logits, gate weights, expert indices)."""
    return {n: m for n, m in model.named_modules() if type(m).__name__.lower().endswith("router")}


class ExpertLoad:
    """Records, while it is entered, the experts that every layer chooses for every position."""

    def __init__(self, model):
        self._chosen: dict[torch.nn.Module, list[torch.Tensor]] = {
            m: [] for m in routers(model).values()
        }

    def __enter__(self) -> ExpertLoad:
        self._handles = [m.register_forward_hook(self._hook) for m in self._chosen]
        return self

    def _hook(self, module, args, output) -> None:
        self._chosen[module].append(output[-1])

    def __exit__(self, *_) -> None:
        for handle in self._handles:
            handle.remove()

    def worst(self, counted: torch.Tensor) -> float:
        """Load of the busiest expert over the mean load, in the worst layer.

        `counted` (positions,) bool leaves out padding, which is routed too.
        """
        loads = [
            torch.cat(chosen)[counted].flatten().bincount(minlength=len(module.weight)).float()
            for module, chosen in self._chosen.items()
        ]
        return max(float(load.max() / load.mean()) for load in loads)
