"""The trainers that people call: PPOTrainer, in one process, under a launcher, or on Ray."""
