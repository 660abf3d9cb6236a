"""Layer 1, data and rewards: is the target right?"""

from .verifiers import VERIFIERS, Verdict, any_answer, math_answer, strict_answer, verify

__all__ = ["VERIFIERS", "Verdict", "any_answer", "math_answer", "strict_answer", "verify"]
