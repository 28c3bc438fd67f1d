"""The fastest setting within the budget: chosen from predictions, or found by measuring as you go."""
