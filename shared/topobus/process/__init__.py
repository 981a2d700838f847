"""What every process has: configuration, logs, metrics, readiness, clock, and the frame that runs a
service.
"""
