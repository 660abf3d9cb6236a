"""Layer 3, numerical updates: can the parameters be updated at all?"""

from .gradients import clip_gradients, gradient_norm

__all__ = ["clip_gradients", "gradient_norm"]
