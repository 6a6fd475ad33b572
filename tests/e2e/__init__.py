"""The whole engine: the exactness contract, by bits."""
