"""Training: the step that every method shares, and the methods that drive it."""
