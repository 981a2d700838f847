"""Answers kubelet's DRA calls and keeps the checkpoint of the claims that are prepared here."""
