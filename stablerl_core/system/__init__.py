"""Layer 4, the training system: did the logged probabilities come from the policy that sampled?"""

from .corrections import (
    CORRECTIONS,
    ImportanceWeights,
    catastrophic_veto,
    geometric_rejection,
    importance_weights,
    minimum_prefix_weights,
    prefix_weights,
)
from .generation import Recorded, SamplingRecorder
from .kept_sets import KeptSets
from .lr_surge import LengthSurgeDecay, length_surge
from .mismatch import MismatchReport, ProbabilityBin, logit_noise_bound, mismatch_report
from .off_policy import off_policy_sequence_mask, positional_decay, weight_threshold_mask
from .queues import (
    Completion,
    LengthTail,
    QueueRates,
    QueueRules,
    QueueRun,
    TrainedBatch,
    simulate_queues,
)
from .routing import Recording, RoutingRecord, record_routing, replay_routing
from .routing_compare import RoutingComparison, compare_routing
from .sampling import (
    Refiltered,
    Sample,
    kept_mass,
    masked_log_probs,
    rerun_filter,
    sample_tokens,
)
from .speculative import (
    SpeculativeRollout,
    Verified,
    draft_acceptance,
    speculative_rollout,
    verify_draft,
)
from .staleness import (
    Admission,
    StalenessReport,
    fresh_sequences,
    may_admit,
    reset_optimizer_state,
    staleness_report,
    token_staleness,
    too_old,
    version_lists,
)
from .tokenization import TokenizationDrift, round_trip_drift
from .vocabulary import SafeVocabulary, safe_vocabulary
from .weight_sync import (
    ControlVerdict,
    Fingerprint,
    SyncFault,
    SyncReport,
    compare_fingerprints,
    fingerprints,
    lr_zero_control,
)

__all__ = [
    "Admission",
    "CORRECTIONS",
    "Completion",
    "ControlVerdict",
    "Fingerprint",
    "ImportanceWeights",
    "KeptSets",
    "LengthSurgeDecay",
    "LengthTail",
    "MismatchReport",
    "ProbabilityBin",
    "QueueRates",
    "QueueRules",
    "QueueRun",
    "Recorded",
    "Recording",
    "Refiltered",
    "RoutingComparison",
    "RoutingRecord",
    "SafeVocabulary",
    "Sample",
    "SamplingRecorder",
    "SpeculativeRollout",
    "StalenessReport",
    "SyncFault",
    "SyncReport",
    "TokenizationDrift",
    "TrainedBatch",
    "Verified",
    "catastrophic_veto",
    "compare_fingerprints",
    "compare_routing",
    "draft_acceptance",
    "fingerprints",
    "fresh_sequences",
    "geometric_rejection",
    "importance_weights",
    "kept_mass",
    "length_surge",
    "logit_noise_bound",
    "lr_zero_control",
    "masked_log_probs",
    "may_admit",
    "minimum_prefix_weights",
    "mismatch_report",
    "off_policy_sequence_mask",
    "positional_decay",
    "prefix_weights",
    "record_routing",
    "replay_routing",
    "rerun_filter",
    "reset_optimizer_state",
    "round_trip_drift",
    "safe_vocabulary",
    "sample_tokens",
    "simulate_queues",
    "speculative_rollout",
    "staleness_report",
    "token_staleness",
    "too_old",
    "verify_draft",
    "version_lists",
    "weight_threshold_mask",
]
