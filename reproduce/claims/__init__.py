"""Every claim of the paper that can be checked here, one file per table or figure.

    shiva validate                        # the quick ones, a verdict per claim
    python -m reproduce.claims.joint_learning  # one of them, at full size; --record keeps it

A file has `run(seeds, quick) -> Result` and, where people would rather look, `draw(result, axes)`.
"""

SYNTHETIC = (
    "joint_learning",
    "single_path",
    "accumulation",
    "relaxation",
    "jacobian",
    "stratified",
    "film",
    "budget_control",
    "estimators",
)
"""Need nothing but the library; quick in their `quick` form."""

ON_THE_MODEL = (
    "trained_block",
    "router_sharing",
    "router_context",
    "router_estimators",
    "training_strategy",
    "temperatures",
    "ratio_policy",
    "budget_on_model",
    "learned_schedule",
    "selection",
    "guidance_halves",
    "router_maps",
)
"""Need the embedded model, and minutes to hours."""

FROM_TABLES = ("quality_tables", "speed_tables", "cost_tables")
"""Read from the committed results of `shiva eval` and `shiva bench`."""
