"""Save, verify, restore."""

from zoo.checkpoint.checkpoints import CheckpointError, Checkpoints, saved_steps
from zoo.checkpoint.leaves import is_finite

__all__ = ["CheckpointError", "Checkpoints", "is_finite", "saved_steps"]
