"""python -m zoo.cli: the same as `zoo`."""

import sys

from zoo.cli import main

sys.exit(main())
