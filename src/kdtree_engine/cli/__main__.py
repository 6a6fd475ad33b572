"""`python -m kdtree_engine.cli`, for environments whose scripts are not on the path."""

from kdtree_engine.cli import main

main()
