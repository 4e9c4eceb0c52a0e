"""The default study, which comes with the package: `moe-rl run routing_replay` needs no checkout.

Read or copy moe_rl/study/routing_replay.py; `moe-rl new my_study` begins one of your own.
"""

from moe_rl.study import routing_replay

study = routing_replay.study
