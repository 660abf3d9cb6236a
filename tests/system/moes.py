"""Small models of the families whose routing is tested, and their gates written by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

EXPERTS, TOP_K, VOCABULARY = 8, 2, 50
SIZE = dict(
    vocab_size=VOCABULARY,
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=128,
    num_experts_per_tok=TOP_K,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=1,
)
MLA = dict(q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
WIDTH = dict(moe_intermediate_size=16, intermediate_size=24)
GROUPED = dict(n_routed_experts=EXPERTS, n_group=4, topk_group=2, routed_scaling_factor=2.5)

# The seven that must work; then others, which no line of the code knows of.
CONFIGS = {
    "mixtral": lambda: MixtralConfig(**SIZE, num_local_experts=EXPERTS, intermediate_size=16),
    "qwen2-moe": lambda: Qwen2MoeConfig(
        **SIZE, **WIDTH, num_experts=EXPERTS, shared_expert_intermediate_size=16
    ),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **SIZE, **WIDTH, num_experts=EXPERTS, head_dim=8, norm_topk_prob=True
    ),
    "olmoe": lambda: OlmoeConfig(**SIZE, num_experts=EXPERTS, intermediate_size=16),
    "deepseek-v3": lambda: DeepseekV3Config(
        **SIZE, **MLA, **WIDTH, **GROUPED, first_k_dense_replace=1, n_shared_experts=1
    ),
    "glm4-moe": lambda: Glm4MoeConfig(
        **SIZE, **WIDTH, n_routed_experts=EXPERTS, head_dim=8, first_k_dense_replace=1,
        n_group=1, topk_group=1, routed_scaling_factor=1.5, norm_topk_prob=False,
    ),
    "gpt-oss": lambda: GptOssConfig(
        **SIZE, num_local_experts=EXPERTS, intermediate_size=16, head_dim=8, sliding_window=6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}  # fmt: skip
OTHERS = {
    "deepseek-v2": lambda: DeepseekV2Config(
        **SIZE, **MLA, **WIDTH, **GROUPED, topk_method="group_limited_greedy", n_shared_experts=1
    ),
    "ernie4.5-moe": lambda: Ernie4_5_MoeConfig(
        **SIZE, **WIDTH, moe_num_experts=EXPERTS, moe_k=TOP_K, moe_layer_start_index=1,
        moe_num_shared_experts=1,
    ),
    "granite-moe": lambda: GraniteMoeConfig(
        **SIZE, num_local_experts=EXPERTS, intermediate_size=16
    ),
}  # fmt: skip
FAMILIES = tuple(CONFIGS)


@torch.no_grad()
def moe(family: str, seed: int = 0) -> PreTrainedModel:
    """A model with weights so large that a wrong expert shows, and biases that are not zero."""
    config = {**CONFIGS, **OTHERS}[family]()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for name, tensor in model.state_dict().items():
            if "correction_bias" in name or name.endswith("bias"):
                tensor.copy_(0.1 * torch.randn(tensor.shape))
            elif "gate.weight" in name or "router.weight" in name:
                tensor.copy_(0.7 * torch.randn(tensor.shape))
            elif tensor.dim() > 1:
                tensor.mul_(8)
    return model


def tokens(rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (rows, columns), generator=generator)


def routers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__.lower().endswith("router")]


def experts(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__.lower().endswith("experts")]


def logits(family: str, router: nn.Module, hidden: Tensor) -> Tensor:
    hidden = hidden.reshape(-1, hidden.shape[-1])
    return nn.functional.linear(hidden, router.weight, getattr(router, "bias", None))


def gates(family: str, scores: Tensor, ids: Tensor) -> Tensor:
    """Weights (N, k) of experts `ids` (N, k) from router logits (N, E), as each paper has them."""
    chosen = scores.gather(1, ids)
    if family in ("mixtral", "qwen3-moe", "gpt-oss"):
        return chosen.softmax(-1)  # over the chosen ones: the same as to renormalise
    if family in ("qwen2-moe", "olmoe"):
        return scores.softmax(-1).gather(1, ids)
    if family == "deepseek-v2":
        return 2.5 * scores.softmax(-1).gather(1, ids)
    if family == "deepseek-v3":
        return 2.5 * chosen.sigmoid() / chosen.sigmoid().sum(-1, keepdim=True)
    if family == "glm4-moe":
        return 1.5 * chosen.sigmoid()
    raise KeyError(family)
