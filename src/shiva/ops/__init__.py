from shiva.ops.losses import BudgetController, normalized_distance
from shiva.ops.policy import FiLMPolicy, RatioPolicy
from shiva.ops.router import ContextRouter, RouterBank
from shiva.ops.schedule import RatioSchedule
from shiva.ops.softrank import soft_rank
from shiva.ops.topk import hard_topk, inclusion, input_gated, output_gated, select_tokens, token_count

__all__ = [
    "BudgetController",
    "ContextRouter",
    "FiLMPolicy",
    "RatioPolicy",
    "RatioSchedule",
    "RouterBank",
    "hard_topk",
    "inclusion",
    "input_gated",
    "normalized_distance",
    "output_gated",
    "select_tokens",
    "soft_rank",
    "token_count",
]
