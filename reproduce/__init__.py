"""What exists to fill this paper's tables: its figures, protocols and benchmarks, and a check of every claim.

Outside the wheel: `shiva eval`, `shiva bench` and `shiva validate` find it in a checkout.
"""
