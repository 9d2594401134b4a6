"""Training: configuration, schedules, the compiled step, the loop, checkpoints and metrics."""
