"""The laws that every causal decoder keeps, as a function that anyone can run on any model."""

from zoo.laws.reduce import reduced
from zoo.laws.runner import LAWS, Report, check

__all__ = ["LAWS", "Report", "check", "reduced"]
