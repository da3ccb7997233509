"""This machine: its GPUs and memory, as an Inventory."""
