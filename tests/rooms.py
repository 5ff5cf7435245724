"""The rooms of zoo, from the one that imports nothing to the one that may import all (docs/design.md, section 3)."""

ROOMS = [
    "config",
    "kernels",
    "layers",
    "models",
    "data",
    "parallel",
    "objectives",
    "checkpoint",
    "describe",
    "trace",
    "rundir",
    "infer",
    "train",
    "laws",
    "cli",
]
