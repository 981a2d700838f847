"""The user-space files of a GPU's kernel driver: which they are, how containers get them, and how a
container's loader finds them.
"""
