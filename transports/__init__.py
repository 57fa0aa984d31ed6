"""The ways to move the bytes of a round from the trainer to the engines."""
