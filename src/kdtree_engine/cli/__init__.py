"""The command `kdtree`: turns arguments into calls, and errors into one line.

Nothing heavy is imported here or in the modules below before a command runs, so that `--help`
answers at once.
"""

from kdtree_engine.cli.app import main, run

__all__ = ["main", "run"]
