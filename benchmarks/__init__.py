"""Benchmarks; each is run as a module and prints its figures last, one JSON object a line."""
