"""Many devices: the planner, and a planned model over ranks of torch.distributed."""

from bluejay.parallel.apply import apply, as_one, take_piece
from bluejay.parallel.collectives import IGNORED, cross_entropy_sum, sum_out
from bluejay.parallel.cut import cut_model, cut_part
from bluejay.parallel.generate import Meeting
from bluejay.parallel.memory import Memory, Traffic, packed_bytes
from bluejay.parallel.mesh import Rank, build_mesh, from_all, from_first, group_of, join, leave, place_of
from bluejay.parallel.partition import balance, even_shares, nearest_shares, rows_at_once, share_layers
from bluejay.parallel.peers import PlannedRanks, Replicas
from bluejay.parallel.plan import Plan, Stage, plan, propose
from bluejay.parallel.schedule import Action, bubble, in_flight, timeline
from bluejay.parallel.state import own_part, own_values, whole_tensors
from bluejay.parallel.step import PlannedStep

__all__ = [
    "IGNORED",
    "Action",
    "Meeting",
    "Memory",
    "Plan",
    "PlannedRanks",
    "PlannedStep",
    "Rank",
    "Replicas",
    "Stage",
    "Traffic",
    "apply",
    "as_one",
    "balance",
    "bubble",
    "build_mesh",
    "cross_entropy_sum",
    "cut_model",
    "cut_part",
    "even_shares",
    "from_all",
    "from_first",
    "group_of",
    "in_flight",
    "join",
    "leave",
    "nearest_shares",
    "own_part",
    "own_values",
    "packed_bytes",
    "place_of",
    "plan",
    "propose",
    "rows_at_once",
    "share_layers",
    "sum_out",
    "take_piece",
    "timeline",
    "whole_tensors",
]
