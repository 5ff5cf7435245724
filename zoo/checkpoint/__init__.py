"""Save, verify, restore."""

from zoo.checkpoint.checkpoints import CheckpointError, Checkpoints
from zoo.checkpoint.leaves import is_finite

__all__ = ["CheckpointError", "Checkpoints", "is_finite"]
