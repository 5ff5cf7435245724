"""Scaled dot-product attention with grouped key and value heads, by the fastest backend that can do what is asked."""

from zoo.kernels.attention.api import Attend, attention, explain

__all__ = ["Attend", "attention", "explain"]
