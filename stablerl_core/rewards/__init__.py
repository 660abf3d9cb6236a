"""Layer 1, data and rewards: is the target right?"""

from .scoring import Reward, reward_by_name, strict_reward
from .tasks import MARKER, Problem, Task, final_answer, split_of, task_by_name
from .verifiers import VERIFIERS, Verdict, any_answer, math_answer, strict_answer, verify

__all__ = [
    "MARKER",
    "VERIFIERS",
    "Problem",
    "Reward",
    "Task",
    "Verdict",
    "any_answer",
    "final_answer",
    "math_answer",
    "reward_by_name",
    "split_of",
    "strict_answer",
    "strict_reward",
    "task_by_name",
    "verify",
]
