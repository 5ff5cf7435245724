"""Train a model: python train.py --config configs/quickstart.py; the same as `zoo train`."""

import sys

from zoo.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
