"""What a config costs: parameters, operations, memory and cache, from abstract arrays."""

from zoo.describe.compare import Comparison, compare
from zoo.describe.devices import DEVICES, find_device, peak_flops
from zoo.describe.parameters import Parameters, count_parameters, count_parts, expert_share, flops_per_token
from zoo.describe.question import Question, question_of
from zoo.describe.report import Description, describe
from zoo.describe.table import preset_table

__all__ = [
    "DEVICES",
    "Comparison",
    "Description",
    "Parameters",
    "Question",
    "compare",
    "count_parameters",
    "count_parts",
    "describe",
    "expert_share",
    "find_device",
    "flops_per_token",
    "peak_flops",
    "preset_table",
    "question_of",
]
