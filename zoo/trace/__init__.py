"""One sentence through a model: every array of a forward pass, with its meaning, as text and as a page."""

from zoo.trace.record import TraceError, trace
from zoo.trace.result import Experts, Guess, Layer, Looks, Step, Trace

__all__ = ["Experts", "Guess", "Layer", "Looks", "Step", "Trace", "TraceError", "trace"]
