from shiva.modules.losses import BudgetController, normalized_distance
from shiva.modules.policy import FiLMPolicy, RatioPolicy
from shiva.modules.router import ContextRouter, RouterBank
from shiva.modules.schedule import RatioSchedule
from shiva.modules.softrank import soft_rank
from shiva.modules.topk import hard_topk, inclusion, input_gated, output_gated, select_tokens, token_count

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
