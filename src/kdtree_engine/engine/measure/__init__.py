"""`kdtree bench`: what a decode step takes on this machine, beside what it must take at least."""
