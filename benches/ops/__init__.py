"""What each operator offers to benches/kernels.py: variants to check and time."""
