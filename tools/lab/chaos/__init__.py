"""Proof by faults: the node plane under load while its parts are killed, frozen, cut off and lied
to, watched from the outside.
"""
