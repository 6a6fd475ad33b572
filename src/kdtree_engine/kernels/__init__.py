"""Operators, one folder each: a reference, a kernel where there is one, the operator, its cases."""
