"""What the documentation shows, run and checked."""
