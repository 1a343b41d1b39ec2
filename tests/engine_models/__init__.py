"""Real models on the engine."""
