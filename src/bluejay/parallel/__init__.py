"""Many devices: the planner, and a planned model over ranks of torch.distributed."""

from bluejay.parallel.partition import balance, even_shares, nearest_shares, share_layers
from bluejay.parallel.plan import Memory, Plan, Stage, Traffic, packed_bytes, plan, propose
from bluejay.parallel.schedule import Action, bubble, in_flight, timeline

__all__ = [
    "Action",
    "Memory",
    "Plan",
    "Stage",
    "Traffic",
    "balance",
    "bubble",
    "even_shares",
    "in_flight",
    "nearest_shares",
    "packed_bytes",
    "plan",
    "propose",
    "share_layers",
    "timeline",
]
