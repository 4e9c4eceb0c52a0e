"""`python -m moe_rl` is `moe-rl`."""

import sys

from moe_rl.cli import main

sys.exit(main())
