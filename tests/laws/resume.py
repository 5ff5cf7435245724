"""Law 8, as a program: kills a run at random moments, and compares its end with a run that nothing disturbed.

python -m tests.laws.resume --kills 20
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.train.records import assert_equal_runs

STEPS = 400
CONFIG = """
from zoo import DataConfig, Experiment, ModelConfig, OptimizerConfig, SparseConfig, TrainConfig

config = Experiment(
    name="killed",
    model=ModelConfig(
        context_length=32, d_model=32, n_layers=2, n_heads=2, dropout=0.1, moe=SparseConfig(n_experts=4, d_ff=32)
    ),
    data=DataConfig(path={text!r}, tokenizer="bytes", cache_dir={cache!r}),
    optimizer=OptimizerConfig(name="muon", warmup_steps=10),
    train=TrainConfig(steps={steps}, batch_size=8, micro_batches=2, log_every=1, eval_every=50, save_every=7),
)
"""


def write_config(folder: Path) -> Path:
    """A config on a text of random words, as a file."""
    words = random.Random(0).choices(["tree", "leaf", "root", "branch", "seed", "soil"], k=4000)
    text = folder / "text.txt"
    text.write_text(" ".join(words))
    config = folder / "config.py"
    config.write_text(CONFIG.format(text=str(text), cache=str(folder / "cache"), steps=STEPS))
    return config


def start(config: Path, directory: Path) -> subprocess.Popen:
    """`zoo train` in a process of its own; compiled programs are shared between starts."""
    command = [sys.executable, "-m", "zoo.cli", "train", "--config", str(config), "--train.dir", str(directory)]
    # As users run it: on one device, and optimized.
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    env["JAX_COMPILATION_CACHE_DIR"] = str(config.parent / "jax")
    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def kill_somewhere(process: subprocess.Popen, chance: random.Random) -> str | None:
    """Kills the run while it starts up or some steps later; the last line it printed, None where it had ended."""
    if chance.random() < 0.25:
        time.sleep(chance.uniform(0, 6))
        process.kill()
        return "starting up" if process.wait() == -signal.SIGKILL else None
    steps, line = chance.randrange(1, 40), ""
    for line in process.stdout:
        steps -= line.startswith("step ")
        if steps == 0:
            break
    time.sleep(chance.uniform(0, 0.05))
    process.kill()
    return line.split("  ")[0].strip() if process.wait() == -signal.SIGKILL else None


def finish(process: subprocess.Popen) -> None:
    """Lets a run come to its end."""
    output, _ = process.communicate()
    assert process.returncode == 0, output


def main(kills: int, seed: int, folder: Path) -> int:
    """The number of kills before the run ended; raises AssertionError where its end is another one."""
    config, chance = write_config(folder), random.Random(seed)
    whole, killed = folder / "whole", folder / "killed"
    finish(start(config, whole))
    done = 0
    while done < kills and (place := kill_somewhere(start(config, killed), chance)) is not None:
        done += 1
        print(f"kill {done}: {place}", flush=True)
    finish(start(config, killed))
    assert_equal_runs(killed, whole, STEPS)
    return done


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        number = main(arguments.kills, arguments.seed, Path(temporary))
    print(f"{number} kills; checkpoint and metrics at step {STEPS} equal those of a run without any, bit for bit")
