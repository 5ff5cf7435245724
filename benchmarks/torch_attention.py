"""The peer of attention.py: reads a problem as a line of JSON, then computes it per line and prints the seconds."""

import json
import sys
import time

import numpy
import torch


def main():
    settings = json.loads(sys.stdin.readline())
    torch.manual_seed(0)
    shape = (settings["B"], settings["H"], settings["T"], settings["D"])
    dtype = getattr(torch, settings["dtype"])
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=settings["gradients"]) for _ in range(3))
    mask = torch.from_numpy(numpy.load(settings["mask"])) if settings["mask"] else None

    def step():
        start = time.perf_counter()
        attend = torch.nn.functional.scaled_dot_product_attention
        with torch.set_grad_enabled(settings["gradients"]):
            out = attend(q, k, v, attn_mask=mask, is_causal=mask is None)
            if settings["gradients"]:
                torch.autograd.grad(out, (q, k, v), out)
        return time.perf_counter() - start

    step()
    print(json.dumps({"torch": torch.__version__}), flush=True)
    for _ in sys.stdin:
        print(step(), flush=True)


if __name__ == "__main__":
    main()
