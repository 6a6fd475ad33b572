"""Errors that a user can cause.

Each message is one line that says what was found, what was expected and what to do. The command
prints it without a traceback and exits with a code other than 0. A broken invariant inside the
engine is an assertion instead, never one of these.
"""


class KDTreeError(Exception):
    """Base of every error whose cause lies outside the engine."""


class CheckpointError(KDTreeError):
    """A model folder is missing, damaged, or holds other tensors than its config promises."""


class ConfigError(KDTreeError):
    """A configuration lacks a key, or describes a model that the engine does not support."""


class TokenizerError(KDTreeError):
    """A vocabulary is missing or damaged, or a token id or message cannot be translated."""


class OptionError(KDTreeError):
    """An option given by the user is out of range or contradicts another."""


class DrafterError(KDTreeError):
    """A drafter does not fit the target model."""


class CapacityError(KDTreeError):
    """A request needs more room (cache pages, positions) than the engine was given."""
