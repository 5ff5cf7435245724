"""The validation set: loss per token, bits per byte, perplexity."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from zoo.data.cache import TokenCache
from zoo.data.loader import evaluation_batches
from zoo.parallel.distributed import global_batch, process_rows
from zoo.parallel.rules import batch_parts
from zoo.train.metrics import Row
from zoo.train.parts import Parts, windows


def evaluate(parts: Parts, eval_step: Callable[..., Any], params: PyTree[Any]) -> Row:
    """Loss of the whole validation set: the sum over its tokens divided by their number.

    Every row is summed on the devices, in float32, and the rows in float64 here. So the result does not depend on the
    batch size beyond the rounding within rows, about 1e-7 of it.
    """
    mesh, cache = parts.mesh, parts.corpus.validation
    n_parts = batch_parts(mesh)
    size = -(-parts.experiment.train.eval_batch_size // n_parts) * n_parts
    rows = process_rows(size, mesh)
    loss = labels = np.float64(0)
    for batch in evaluation_batches(cache, batch_size=size, rows=rows, **windows(parts.experiment)):
        row_loss, row_labels = jax.device_get(eval_step(params, global_batch(batch, mesh)))
        loss, labels = loss + row_loss.astype(np.float64).sum(), labels + row_labels.astype(np.float64).sum()
    return validation_row(float(loss), float(labels), cache)


def validation_row(loss: float, labels: float, cache: TokenCache) -> Row:
    """`val/...`: from the summed loss in nats, nats per token, bits per byte of the text and perplexity; and
    what gzip -9 needs."""
    return {
        "val/loss": loss / labels,
        "val/bits_per_byte": loss / math.log(2) / cache.text_bytes,
        "val/perplexity": math.exp(min(loss / labels, 700)),
        "val/gzip_bits_per_byte": 8 * (cache.gzip_bytes or 0) / cache.text_bytes,
    }
