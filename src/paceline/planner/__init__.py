"""What would be best: descriptions, predictions of a step and of days, and the choice of a plan."""
