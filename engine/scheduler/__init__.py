"""What is computed in the next step."""
