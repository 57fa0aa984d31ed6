"""The demo: a small policy that learns while every round of its weights walks the diagram."""
