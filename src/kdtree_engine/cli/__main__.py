"""`python -m kdtree_engine.cli`, for environments whose scripts are not on the path."""

from . import main

main()
