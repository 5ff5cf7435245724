"""The peer of train_step.py: reads a model as a line of JSON, then takes a step per line and prints its seconds.

Its first answer is a line of JSON with its versions, or with the error that keeps it from running.
"""

import json
import sys
import time
from contextlib import nullcontext

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM


def build(settings):
    """The same decoder: Llama, or Mixtral with its balance loss for a sparse mixture; tied embeddings."""
    moe = settings["moe"]
    shared = {
        "vocab_size": settings["vocab_size"],
        "max_position_embeddings": settings["context_length"],
        "hidden_size": settings["d_model"],
        "num_hidden_layers": settings["n_layers"],
        "num_attention_heads": settings["n_heads"],
        "num_key_value_heads": settings["n_kv_heads"],
        "intermediate_size": moe["d_ff"] if moe else settings["d_ff"],
        "tie_word_embeddings": True,
        "use_cache": False,
    }
    if not moe:
        return LlamaForCausalLM(LlamaConfig(**shared))
    experts = {"num_local_experts": moe["n_experts"], "num_experts_per_tok": moe["top_k"], "output_router_logits": True}
    return MixtralForCausalLM(MixtralConfig(**shared, **experts, router_aux_loss_coef=0.005))


def stepper(settings):
    """A function that takes one step and returns its seconds."""
    torch.manual_seed(0)
    model = build(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = torch.randint(0, settings["vocab_size"], (settings["rows"], settings["context_length"]))
    run = torch.compile(model) if settings["compiled"] else model
    precision = torch.autocast("cpu", torch.bfloat16) if settings["bfloat16"] else nullcontext()

    def step():
        start = time.perf_counter()
        optimizer.zero_grad()
        with precision:
            loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return time.perf_counter() - start

    return step


def main():
    step = stepper(json.loads(sys.stdin.readline()))
    try:
        step()
    except Exception as error:  # whatever keeps a compiler from its work, the others can still be measured
        print(json.dumps({"error": f"{type(error).__name__}: {error}".splitlines()[0]}), flush=True)
        return
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__}), flush=True)
    for _ in sys.stdin:
        print(step(), flush=True)


if __name__ == "__main__":
    main()
