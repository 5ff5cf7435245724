"""The model of moe_sparse.py with a soft mixture: one merged expert per segment of 64 tokens (SMEAR, causal).

zoo train --config configs/moe_soft.py

On two CPU cores: 3 minutes, 1.74 bits per byte.
"""

import dataclasses

from moe_sparse import config as sparse

from zoo import SoftConfig

moe = SoftConfig(n_experts=sparse.model.moe.n_experts, d_ff=sparse.model.moe.d_ff, segment_length=64)

config = dataclasses.replace(sparse, name="moe_soft", model=dataclasses.replace(sparse.model, moe=moe))
