"""The run-time type checker of the tests: every annotated shape in `moe_rl` is checked at every call."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is welcome where a float is asked for
