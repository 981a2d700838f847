"""The lifecycle of claims and of their pods as values: reads objects and makes their next versions.

Pure.
"""
