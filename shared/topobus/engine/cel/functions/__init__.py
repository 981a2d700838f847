"""The functions that an expression may call, one module for each library; `environment` registers
them all.
"""
