"""Diagnosis: what a log says went wrong."""
