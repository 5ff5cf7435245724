"""The quickstart's model for two thirds of its steps, to be compared with moe_dense.py, moe_soft.py and dense.py.

    zoo train --config configs/moe_sparse.py

A sparse mixture: each token goes to 2 of 8 experts. --mixture dense, soft or none puts another in its place.
On two CPU cores: 2.5 minutes, 1.70 bits per byte.
"""

import dataclasses

from quickstart import config as quickstart

STEPS = 120

train = dataclasses.replace(quickstart.train, steps=STEPS, eval_every=None, save_every=STEPS // 3, sample_every=None)

config = dataclasses.replace(quickstart, name="moe_sparse", train=train)
