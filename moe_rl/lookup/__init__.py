"""`Use(name, **options)`: how a configuration names a function or a class, and the one importer of what it names."""

from moe_rl.lookup.use import Part, Use, check_options, imported, lookup, needs, needs_of, unknown

__all__ = ["Part", "Use", "check_options", "imported", "lookup", "needs", "needs_of", "unknown"]
