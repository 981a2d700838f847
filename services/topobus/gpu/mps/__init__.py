"""MPS control daemons that the gpu service owns: one for each shared GPU, or for the GPUs of a
claim whose containers share them.
"""
