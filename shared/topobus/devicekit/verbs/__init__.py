"""The verbs that change a device: prepare, attach, adjust, clean, reset.

Each with the journal around it.
"""
