"""Exact parameter counts of every preset, and what the choice of a preset promises."""

import functools

import pytest

import zoo
from zoo.config import ConfigError, SparseConfig
from zoo.describe import count_parameters
from zoo.models.decoder import build
from zoo.models.presets import find_preset, preset_names

# Total parameters: of the published checkpoints (each tensor once), or derived where the preset's note says so.
TOTALS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,
    "opt-125m": 125_239_296,
    "bloom-560m": 559_214_592,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama2-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "smollm2-135m": 134_515_008,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "olmoe-1b-7b": 6_919_161_856,
    "deepseek-moe-16b": 16_375_728_128,
    "gpt-oss-20b": 20_914_757_184,
    "gemma-2b": 2_506_172_416,
    "gemma2-2b": 2_614_341_888,
    "gemma3-270m": 268_098_176,
    "falcon-7b": 6_921_720_704,
    "pythia-160m": 162_322_944,
    "palm-540b": 540_354_281_472,
    "openmoe-8b": 8_779_827_200,
    "switch-base-8-decoder": 307_845_888,
    "switch-base-128-decoder": 3_705_785_088,
}
ACTIVE = {
    "mixtral-8x7b": 12_879_925_248,
    "mixtral-8x22b": 39_161_468_928,
    "olmoe-1b-7b": 1_282_017_280,
}
# In billions, to the published digits: arXiv 2505.09388, the Qwen1.5-MoE and DeepSeek-MoE cards, arXiv 2508.10925
# (which leaves the table of the input out).
ROUNDED = {"qwen3-30b-a3b": 3.35, "qwen1.5-moe-a2.7b": 2.69, "deepseek-moe-16b": 2.83}
# Without the table of the input: arXiv 2403.08295 and 2408.00118, exact; Qwen3's card and gpt-oss, table 1, rounded.
WITHOUT_EMBEDDING = {
    "gemma-2b": 1_981_884_416,
    "gemma2-2b": 2_024_517_888,
    "qwen3-0.6b": pytest.approx(0.44e9, abs=0.005e9),
    "gpt-oss-20b": pytest.approx(3.61e9, abs=0.005e9),
}


@functools.cache
def count(name):
    config = zoo.preset(name)
    return count_parameters(config, build(config).abstract_params())


@pytest.mark.parametrize("name", TOTALS)
def test_total(name):
    assert count(name).total == TOTALS[name]


@pytest.mark.parametrize("name", ACTIVE)
def test_active(name):
    assert count(name).active == ACTIVE[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_active_to_the_published_digits(name):
    assert count(name).active / 1e9 == pytest.approx(ROUNDED[name], abs=0.006)


def test_every_preset_is_counted_and_derived_counts_are_named():
    assert set(TOTALS) == set(preset_names())
    derived = ("gpt3-175b", "palm-540b", "openmoe-8b", "switch-base-8-decoder", "switch-base-128-decoder")
    assert all(find_preset(name).note for name in derived)


@pytest.mark.parametrize("name", WITHOUT_EMBEDDING)
def test_active_without_embedding(name):
    config = zoo.preset(name)
    assert count(name).active - config.vocab_size * config.d_model == WITHOUT_EMBEDDING[name]


def test_openmoe_by_hand():
    """Table and norms once, attention and an FFN in 24 layers, 32 experts and a router in 4 of them."""
    ffn = 3 * 2048 * 8192
    layers = 24 * (4 * 2048 * 24 * 128 + ffn + 2 * 2048) + 4 * (32 * ffn + 2048 * 32)
    assert count("openmoe-8b").total == 256_384 * 2048 + layers + 2048


@pytest.mark.parametrize(("name", "coefficient"), [("mixtral-8x7b", 0.02), ("mixtral-8x22b", 0.001)])
def test_mixtral_has_the_balance_weight_of_its_config_json(name, coefficient):
    """`router_aux_loss_coef` weighs a loss that is k = 2 at balance, where the zoo's is 1."""
    assert zoo.preset(name).moe.balance_weight == 2 * coefficient


def test_llama_comes_with_the_recipe_of_its_table():
    table = {"7b": (3e-4, 1.0), "13b": (3e-4, 1.0), "33b": (1.5e-4, 1.4), "65b": (1.5e-4, 1.4)}
    for size, (learning_rate, trillions) in table.items():
        recipe = find_preset(f"llama-{size}").recipe
        assert recipe == (recipe.__class__)(learning_rate, 4e6, trillions * 1e12)


def test_llamas_recipes_are_settings():
    """LLaMA 1, table 2 and section 2.3; LLaMA 2, table 1 and section 2.2."""
    rows = {"llama-7b": (3e-4, 2048, 1.0e12), "llama-65b": (1.5e-4, 2048, 1.4e12), "llama2-70b": (1.5e-4, 4096, 2.0e12)}
    for name, (learning_rate, length, tokens) in rows.items():
        experiment = zoo.recipe(name)
        rule, train = experiment.optimizer, experiment.train
        assert (rule.name, rule.learning_rate, rule.beta1, rule.beta2) == ("adamw", learning_rate, 0.9, 0.95)
        assert (rule.weight_decay, rule.clip_norm) == (0.1, 1.0)
        assert (rule.schedule, rule.warmup_steps, rule.min_ratio) == ("cosine", 2000, 0.1)
        assert (rule.decay_fraction, rule.final_decay_steps, rule.ema_decay) == (0.2, 0, None)
        assert experiment.model == zoo.preset(name) and experiment.model.context_length == length
        assert train.batch_size * length == pytest.approx(4e6, abs=length / 2)
        assert train.steps * train.batch_size * length == pytest.approx(tokens, rel=1e-5)
    assert zoo.recipe("llama2-7b").optimizer.eps == 1e-5
    for name in ("gpt2", "palm-540b"):
        with pytest.raises(
            ConfigError, match=f"preset='{name}' comes without a recipe .* there are those of llama-7b, "
        ):
            zoo.recipe(name)


def test_fields_can_be_replaced():
    config = zoo.preset("mixtral-8x7b", n_layers=2, moe=SparseConfig(n_experts=4))
    assert (config.n_layers, config.moe.n_experts, config.d_model) == (2, 4, 4096)
    assert zoo.preset("openmoe-8b", n_layers=2, moe=None).n_layers == 2
    assert zoo.preset("llama3-8b", position="alibi").rope_theta == zoo.ModelConfig().rope_theta


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("mixtral-8x7", {}, "preset='mixtral-8x7' is not the name of a preset; did you mean mixtral-8x7b"),
        ("gpt2", {"n_layer": 2}, "preset: n_layer is not a field of ModelConfig; did you mean n_layers"),
        (
            "openmoe-8b",
            {"n_layers": 2},
            "model.n_layers=2 ends before block 6, the first that has model.moe; set at least 6, or model.moe to None",
        ),
        ("gpt2", {"n_heads": 7}, "model.d_model=768 is not a multiple of model.n_heads=7"),
    ],
)
def test_wrong_input(name, overrides, message):
    with pytest.raises(ConfigError, match=message):
        zoo.preset(name, **overrides)
