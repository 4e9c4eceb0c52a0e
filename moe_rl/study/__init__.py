"""A declaration, and how it is carried out."""

from moe_rl.study.declaration import Study

__all__ = ["Study"]
