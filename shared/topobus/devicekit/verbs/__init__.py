"""The verbs that change a device: prepare, attach, adjust, clean, reset.

The journal records each before and after.
"""
