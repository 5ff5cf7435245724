"""The peer of train_step.py: reads a model as a line of JSON, then takes a step per line and prints its seconds."""

import json
import sys
import time

import torch
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


def main():
    settings = json.loads(sys.stdin.readline())
    torch.manual_seed(0)
    model = build(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = torch.randint(0, settings["vocab_size"], (settings["rows"], settings["context_length"]))

    def step():
        start = time.perf_counter()
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return time.perf_counter() - start

    step()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(step(), flush=True)


if __name__ == "__main__":
    main()
