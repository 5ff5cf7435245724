import math

import jax
import pytest

from zoo.config import Block, DenseConfig, ModelConfig, SoftConfig, SparseConfig
from zoo.describe import count_parameters, expert_share, flops_per_token, peak_flops
from zoo.layers.logical import is_spec
from zoo.models.decoder import build

D, F, H, K, h, V, E, L = 8, 12, 2, 1, 4, 32, 4, 3
SIZES = {"vocab_size": V, "d_model": D, "n_layers": L, "n_heads": H, "n_kv_heads": K, "d_ff": F, "context_length": 16}


def count(**settings):
    config = ModelConfig(**SIZES | settings)
    specs = build(config).abstract_params()
    return config, specs, count_parameters(config, specs)


def test_a_plain_decoder_by_hand():
    config, specs, got = count()
    attention = D * H * h + 2 * D * K * h + H * h * D
    layer = attention + 3 * D * F
    norms = (2 * L + 1) * D
    assert got.total == got.active == L * layer + V * D + norms
    assert got.products == L * layer + V * D  # the table is the head too
    assert got.total == sum(math.prod(s.shape) for s in jax.tree.leaves(specs, is_leaf=is_spec))
    seen = (16 + 1) / 2
    assert flops_per_token(config, specs, 16) == 6 * got.products + L * 12 * H * h * seen


def test_a_separate_head_replaces_the_table_in_the_products():
    tied, untied = count()[2], count(tie_embeddings=False)[2]
    assert untied.total == tied.total + V * D
    assert untied.products == tied.products


@pytest.mark.parametrize("moe, share", [(SparseConfig(n_experts=E, d_ff=F, top_k=2), 1 / 2), (DenseConfig(E, F), 1)])
def test_only_the_experts_that_a_token_uses_are_active(moe, share):
    plain, (_, _, got) = count()[2], count(moe=moe)
    router = L * D * E
    assert got.total - plain.total == L * (E - 1) * 3 * D * F + router
    assert got.active - plain.active == L * (share * E - 1) * 3 * D * F + router
    assert got.products - plain.products == got.active - plain.active


def test_a_soft_mixture_multiplies_by_one_expert_and_merges_all_now_and_then():
    assert expert_share(SoftConfig(n_experts=4, segment_length=64)) == 1 / 4 + 1 / 64
    assert expert_share(SoftConfig(n_experts=4, segment_length=1)) == 1
    assert expert_share(None) == 1


def test_a_window_limits_what_a_token_sees():
    config, specs, got = count(pattern=(Block(window=4),))
    seen = sum(min(t + 1, 4) for t in range(16)) / 16
    assert flops_per_token(config, specs, 16) == pytest.approx(6 * got.products + L * 12 * H * h * seen)


def test_peaks_are_those_of_known_devices_only():
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("TPU v5 lite") == 197e12 and peak_flops("TPU v5p") == 459e12
    assert peak_flops("cpu") is None
