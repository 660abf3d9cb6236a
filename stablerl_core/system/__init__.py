"""Layer 4, the training system: did the logged probabilities come from the policy that sampled?"""

from .mismatch import MismatchReport, mismatch_report
from .sampling import Sample, masked_log_probs, sample_tokens

__all__ = ["MismatchReport", "Sample", "masked_log_probs", "mismatch_report", "sample_tokens"]
