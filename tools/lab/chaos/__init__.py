"""Proof by faults: the node plane under load, observed from the outside, while its parts are
killed, frozen, disconnected and given wrong data.
"""
