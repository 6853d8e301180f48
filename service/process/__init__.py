"""Processes, their port, signals, logs and share of the machine."""
