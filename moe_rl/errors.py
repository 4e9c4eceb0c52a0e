"""Errors a user can cause. Each says what, with the values, why it matters and what to do; the CLI exits with 2."""


class MoeRlError(Exception):
    """Base of all errors of this package."""


class ConfigError(MoeRlError, ValueError):
    """A setting, name, path or file that cannot be used."""


class RoutingError(MoeRlError, ValueError):
    """A model that cannot be hooked, or routes that do not fit the forward they meet."""


class RunError(MoeRlError, RuntimeError):
    """A run folder that does not match what was asked, or a run that cannot go on."""


class Diverged(RunError):
    """Gradients or weights are no longer finite."""


class Stopped(MoeRlError):
    """A run was told to stop, and did after a commit."""


class AuxLossSilentlyOn(UserWarning):
    """Something balances the routers of a model in training beside the objective, or against replay."""
