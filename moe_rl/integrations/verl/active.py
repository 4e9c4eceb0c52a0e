"""Importing this module switches moe_rl on in verl: `actor_rollout_ref.model.external_lib` names it."""

from moe_rl.integrations.verl.plugin import activate

activate()
