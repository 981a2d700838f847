"""Runs the drivers of one class: polls them in isolation and publishes inventory and health."""
