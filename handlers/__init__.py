"""What a state asks of the world: lock, engines, clock, log and metrics."""
